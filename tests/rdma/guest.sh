# Sourced by the job that the guest runs: a network card that goes nowhere, Soft-RoCE on it, and one run of pytest.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root KVFERRY_TEST_PATIENCE=4
hostname rdma-lab
ip link set lo up
ip link add roce type dummy
ip addr add 10.77.0.1/24 dev roce
ip link set roce up
rdma link add rxe0 type rxe netdev roce || echo "there is no Soft-RoCE in this kernel"

packets() { cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts; }

# run NAME SECONDS COMMAND: its output in NAME.log; its exit code, seconds and packets in NAME.result
run() {
    local name=$1 seconds=$2 before began
    shift 2
    before=$(packets) began=$SECONDS
    timeout --kill-after 5 "$seconds" "$@" >"/lab/$name.log" 2>&1 </dev/null
    echo "$? $((SECONDS - began)) $(($(packets) - before))" >"/lab/$name.result"
    echo "rdma lab: $name: $(tail -n 1 "/lab/$name.log")"
}

/* A stand-in for librocm_smi64.so.1: one GPU, without a link to anything, at no place of the PCI bus.
 *
 * MORI ends the process where there is an RDMA device and no ROCm SMI, or one that finds no GPU. It asks for nothing but
 * which network device is near which GPU, so that host memory goes over RDMA with this as it does without a GPU.
 */
#include <stdbool.h>
#include <stdint.h>

int rsmi_init(uint64_t flags) { return (void)flags, 0; }

int rsmi_shut_down(void) { return 0; }

int rsmi_num_monitor_devices(uint32_t *count) { return *count = 1, 0; }

int rsmi_dev_pci_id_get(uint32_t device, uint64_t *place) { return (void)device, *place = 0, 0; }

int rsmi_is_P2P_accessible(uint32_t from, uint32_t to, bool *can) { return (void)from, (void)to, *can = false, 0; }

int rsmi_topo_get_link_type(uint32_t from, uint32_t to, uint64_t *hops, int *type) {
  return (void)from, (void)to, *hops = 0, *type = 0, 0;
}

int rsmi_topo_get_link_weight(uint32_t from, uint32_t to, uint64_t *weight) {
  return (void)from, (void)to, *weight = 0, 0;
}

int rsmi_status_string(int status, const char **text) { return (void)status, *text = "an answer of the stand-in", 0; }

"""What SGLang wants to know of a prefill side before it makes receivers: its grid, as PrefillServerInfo."""

from __future__ import annotations

import json
import logging
import threading
import urllib.request
from typing import Any

from kvferry.bootstrap import BootstrapClient
from kvferry.bootstrap.address import parse_address
from kvferry.errors import KvferryError

log = logging.getLogger("kvferry.sglang")

PATIENCE_S = 0.1
"""How long a scheduler may wait for a look-up that usually takes 2 ms; it asks again a second later."""

RECOMPUTE_S = 60.0


class PrefillTable:
    """Prefill sides by bootstrap address; looked up by threads of their own.

    Attributes:
        known: bootstrap address -> PrefillServerInfo.
    """

    def __init__(self, secret: str | None) -> None:
        self._secret = secret
        self.known: dict[str, Any] = {}
        self._running: dict[str, threading.Event] = {}

    def ensure(self, address: str) -> bool:
        """Whether it is known; begins to look it up if not."""
        if address in self.known:
            return True
        done = self._running.get(address)
        if done is None or done.is_set():
            done = self._running[address] = threading.Event()
            threading.Thread(target=self._look_up, args=(address, done), daemon=True).start()
        done.wait(PATIENCE_S)
        return address in self.known

    def _look_up(self, address: str, done: threading.Event) -> None:
        from sglang.srt.disaggregation.common.conn import PrefillServerInfo

        try:
            topology = BootstrapClient(address, token=self._secret).topology(None)
            if topology.sizes is None or topology.missing:
                log.info("prefill at %s: %d ranks are not registered yet", address, len(topology.missing))
                return
            sizes, extra = topology.sizes, topology.entries[0].extra
            self.known[address] = PrefillServerInfo(
                attn_tp_size=sizes.tp, attn_cp_size=sizes.cp, dp_size=sizes.dp, pp_size=sizes.pp, page_size=None,
                kv_cache_dtype=None, follow_bootstrap_room=False,
                prefill_http_port=int(extra["http_port"]) if "http_port" in extra else None,
            )  # fmt: skip
        except KvferryError as error:
            log.warning("prefill at %s: %s", address, error)
        finally:
            done.set()

    def recompute(self, receiver: Any, payload: dict[str, Any]) -> None:
        """POST a request to the prefill server again; what fails fails the receiver's room."""
        try:
            address = payload.get("bootstrap_host"), payload.get("bootstrap_port")
            info = self.known[f"{address[0]}:{address[1]}"]
            host, _ = parse_address(f"{address[0]}:{address[1]}")
            url = f"http://{host}:{info.prefill_http_port}/generate"
            data = json.dumps(payload).encode()
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=RECOMPUTE_S).close()  # noqa: S310 - http, an address of the request
        except Exception as error:  # noqa: BLE001 - whatever it is: the request fails, in words
            log.warning("prefill does not compute the retracted request again: %r", error)
            receiver.abort()

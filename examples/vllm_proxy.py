"""A proxy for one vLLM prefill and one decode server: prefill first, then decode with what its answer says.

python examples/vllm_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It knows nothing of kvferry: any proxy for vLLM's connectors does the same.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

LIMIT_S = 300.0
ROUTES = ("/v1/completions", "/v1/chat/completions")


def ask(url: str, body: dict[str, Any]) -> HTTPResponse:
    """POST JSON; raises HTTPError for a status of 400 and above."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - ours
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=LIMIT_S)  # noqa: S310
    return answer


def prefill_params(url: str, body: dict[str, Any]) -> Any:
    """Compute the prompt and one token there; returns what the decode server is to be told."""
    once = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    once.pop("stream_options", None)
    if "max_completion_tokens" in once:
        once["max_completion_tokens"] = 1
    with ask(url, once) as answer:
        return json.load(answer).get("kv_transfer_params")


def chunks(answer: HTTPResponse) -> Iterator[bytes]:
    """The body of an answer as it comes."""
    with answer:
        while data := answer.read1(65536):
            yield data


def application(prefill: str, decode: str) -> Starlette:
    """The proxy between two base URLs."""

    async def complete(request: Request) -> Response:
        body, path = await request.json(), request.url.path
        try:
            params = await run_in_threadpool(prefill_params, prefill + path, body)
            answer = await run_in_threadpool(ask, decode + path, {**body, "kv_transfer_params": params})
        except urllib.error.HTTPError as error:
            return Response(error.read(), error.code, media_type="application/json")
        except OSError as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 502)
        return StreamingResponse(chunks(answer), answer.status, media_type=answer.headers["Content-Type"])

    return Starlette(routes=[Route(path, complete, methods=["POST"]) for path in ROUTES])


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(application(options.prefill, options.decode), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()

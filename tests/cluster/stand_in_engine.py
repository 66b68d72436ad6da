"""A stand-in for `vllm serve`, for tests of starting, following and ending a server; it computes nothing.

It is told to misbehave by variables: STAND_IN_DIES (before it is healthy), STAND_IN_ENDS_AFTER (that many requests),
STAND_IN_DEAF (to polite signals). STAND_IN_CHILD is a file for the number of a child that left the process group,
STAND_IN_BUSY one that is there after five requests, STAND_IN_SHM one in /dev/shm that it maps and never removes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

served = 0
kept: list[mmap.mmap] = []
LOG = "(APIServer pid={pid}) INFO 11-30 02:58:31 [core.py:{line}] {text}"


def say(text: str) -> None:
    print(LOG.format(pid=os.getpid(), line=7, text=text), flush=True)


def metrics() -> str:
    return "\n".join(
        [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
            'vllm:num_requests_running{engine="0",model_name="model"} 1.0',
            'vllm:num_requests_waiting{engine="0",model_name="model"} 2.0',
            'vllm:kv_cache_usage_perc{engine="0",model_name="model"} 0.25',
            f'vllm:num_preemptions_total{{engine="0",model_name="model"}} {served}.0',
        ]
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        pages = {
            "/health": "",
            "/version": json.dumps({"version": "stand-in"}),
            "/v1/models": json.dumps({"data": [{"id": "model", "max_model_len": 4096}]}),
            "/metrics": metrics(),
        }
        body = pages.get(self.path, "").encode()
        self.send_response(200 if self.path in pages else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        global served
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for index in range(asked["max_tokens"]):
            last = index == asked["max_tokens"] - 1
            self.event(choices=[{"index": 0, "text": "a", "finish_reason": "length" if last else None}])
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        self.event(choices=[], usage=usage)
        self.wfile.write(b"data: [DONE]\n\n")
        served += 1
        if served == 5 and (path := os.environ.get("STAND_IN_BUSY")):
            open(path, "w").close()
        if served == int(os.environ.get("STAND_IN_ENDS_AFTER", "-1")):
            say("stand-in: enough")
            os._exit(9)

    def event(self, **fields: object) -> None:
        self.wfile.write(b"data: " + json.dumps(fields).encode() + b"\n\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    options, others = parser.parse_known_args()
    say(f"args: {' '.join(others)}")
    if path := os.environ.get("STAND_IN_CHILD"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(path, "w") as note:
            note.write(str(child.pid))
    if path := os.environ.get("STAND_IN_SHM"):
        with open(path, "wb+") as file:
            file.truncate(mmap.PAGESIZE)
            kept.append(mmap.mmap(file.fileno(), mmap.PAGESIZE))
    if "STAND_IN_DEAF" in os.environ:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    say("Loading weights took 0.01 seconds")
    time.sleep(0.4)
    if "STAND_IN_DIES" in os.environ:
        print("ValueError: no room for the KV cache", file=sys.stderr, flush=True)
        sys.exit(3)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()

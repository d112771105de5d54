"""Map a server over an array: answers in their places through faults, samples, failures as values, and a rerun for nothing.

Run it with a server of yours, ``python examples/map_api.py http://localhost:8000/v1 my-model``, or alone: then it starts a
small server on this machine that is too busy for one request in five.
"""

import json
import random
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import outlines_like as ol


class Busy(BaseHTTPRequestHandler):
    """Answers a prompt in capitals, unless it is too busy just now, or the prompt is too long."""

    protocol_version = "HTTP/1.1"
    dice = random.Random(0)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = asked["messages"][-1]["content"]
        if self.dice.random() < 0.2:
            return self.tell(429, {"error": {"message": "too busy"}}, {"retry-after-ms": "20"})
        if len(prompt) > 50:
            return self.tell(400, {"error": {"message": "This model's maximum context length is 50 characters."}})
        texts = [f"{prompt.upper()}{'!' * k}" for k in range(asked.get("n", 1))]
        told = [{"index": k, "message": {"content": text}, "finish_reason": "stop"} for k, text in enumerate(texts)]
        return self.tell(200, {"choices": told, "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(texts)}})

    def tell(self, status, answer, headers=None):
        body = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Say nothing."""


@contextmanager
def busy_server():
    """The address of a small server on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def show(url, name):
    """What a map over a server looks like."""
    model = ol.models.openai(name, base_url=url, concurrency=(8, 32), timeout=60, retries=8)

    words = [f"word {i}" for i in range(200)]
    answers = model(words)
    print(f"{len(answers)} answers, the first {answers[0]!r}, the last {answers[-1]!r}")

    print("three samples each:", model(words[:2], samples=3).tolist())

    careful = ol.vectorize(model, on_error="return")
    for answer in careful(["short", "long " * 20]):
        print(f"{type(answer).__name__}: {answer!s:.60}")

    print("what a rerun would do:", model.plan(words))


def main(url=None, name="my-model"):
    if url:
        return show(url, name)
    with busy_server() as address:
        return show(address, name)


if __name__ == "__main__":
    main(*sys.argv[1:])

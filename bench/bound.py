"""Claim: a session that reaches its bound does not hold up another one at the proxy.

    python bench/bound.py [--calls 2048]

One session makes calls of 30 kB, each a conversation of its own, until the proxy refuses or the
session has made `--calls` calls. Then the session is rewarded and exported. Meanwhile sessions of
another process make short calls, and are exported, too. The short calls are measured alone, then
beside the large calls, and then beside the large export. Each line shows the median and the worst
wait of the short calls in ms, and the proxy's memory. The engine answers at once, as in
bench/proxy.py.
"""

import argparse
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
from load import usage

from inference.process import free_port

SERVE = [sys.executable, str(Path(__file__).with_name("proxy.py")), "--serve"]
ADMIN = {"Authorization": "Bearer admin"}


class Session:
    def __init__(self, url: str) -> None:
        wire = httpx.HTTPTransport(retries=8)  # the proxy may not listen yet
        self.http = httpx.Client(base_url=url, timeout=600, transport=wire)
        self.http.post("/grant_capacity", headers=ADMIN)
        started = self.http.post("/rl/start_session", json={"task_id": "t"}, headers=ADMIN)
        self.id = started.json()["session_id"]

    def call(self, text: str) -> int:
        body = {"messages": [{"role": "user", "content": text}]}
        return self.http.post(f"/{self.id}/v1/chat/completions", json=body).status_code

    def fill(self, calls: int) -> str:
        done = 0
        while done < calls and self.call(f"{done} " + "word " * 6000) == 200:
            done += 1
        return f"{done} calls"

    def export(self) -> str:
        self.http.post(f"/{self.id}/rl/set_reward", json={"reward": 1})
        self.http.post(f"/{self.id}/rl/end_session", json={})
        body = {"session_id": self.id}
        with self.http.stream("POST", "/export_trajectories", json=body, headers=ADMIN) as answer:
            size = sum(map(len, answer.iter_raw()))
        return f"{size / 1e6:,.0f} MB"


def measure(url: str, stop: Any, waits: Any) -> None:
    """Make short calls until `stop` is set, and put the ms of each into `waits`."""
    found, session = list[float](), Session(url)
    while not stop.is_set():
        if len(found) % 1000 == 999:  # change the session before its own bound
            session.export()
            session = Session(url)
        asked = time.perf_counter()
        assert session.call(f"hello {len(found)}") == 200
        found.append(1e3 * (time.perf_counter() - asked))
        time.sleep(0.02)
    session.export()
    waits.put(sorted(found))


def beside(url: str, work: Callable[[], str]) -> tuple[str, list[float]]:
    """Do `work` while another process makes short calls. Return its result and their waits."""
    stop, waits = multiprocessing.Event(), multiprocessing.Queue()
    other = multiprocessing.Process(target=measure, args=(url, stop, waits))
    other.start()
    time.sleep(2)
    result = work()
    stop.set()
    found = waits.get()
    other.join()
    return result, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10**6, help="at most; default: the bound")
    args = parser.parse_args()
    port, alone = free_port(), 0.0
    process = subprocess.Popen([*SERVE, str(port)])
    try:
        url = f"http://127.0.0.1:{port}"
        large = Session(url)
        works = {"alone": lambda: time.sleep(8) or "", "fill": lambda: large.fill(args.calls)}
        for name, work in (works | {"export": large.export}).items():
            result, waits = beside(url, work)
            alone = alone or waits[-1]
            print(
                f"{name:7} {result:12} median {waits[len(waits) // 2]:.0f} ms, worst"
                f" {waits[-1]:.0f} ms, {waits[-1] / alone:.1f} times alone; proxy"
                f" {usage(process.pid)[0]:,.0f} MB",
                flush=True,
            )
    finally:
        process.terminate()
        process.wait(timeout=60)


if __name__ == "__main__":
    main()

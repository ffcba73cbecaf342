"""Submit over REST: how long until RUNNING, the first log line on the websocket, and the close of
the stream (the moment a follower knows). Entrypoint `echo hi`. Run with the ray environment's
python: aiohttp is the client on both sides."""
import asyncio
import sys
import time

import aiohttp

from lib import Mobula, Ray, first_job, spread, write_result


async def one(address):
    times = {}
    async with aiohttp.ClientSession() as session:
        began = time.monotonic()
        async with session.post(f"{address}/api/jobs/", json={"entrypoint": "echo hi"}) as reply:
            job = (await reply.json())["submission_id"]
        times["submit_returns_s"] = time.monotonic() - began

        async def watch_state():
            while True:
                async with session.get(f"{address}/api/jobs/{job}") as reply:
                    status = (await reply.json())["status"]
                if status != "PENDING" and "running_s" not in times:
                    times["running_s"] = time.monotonic() - began
                if status in ("SUCCEEDED", "FAILED", "STOPPED"):
                    assert status == "SUCCEEDED", status
                    times["terminal_s"] = time.monotonic() - began
                    return
                await asyncio.sleep(0.002)

        async def follow():
            text = ""
            async with session.ws_connect(f"{address}/api/jobs/{job}/logs/tail") as ws:
                async for message in ws:
                    if message.type is not aiohttp.WSMsgType.TEXT:
                        break
                    text += message.data
                    if "\nhi" in "\n" + text and "first_line_s" not in times:
                        times["first_line_s"] = time.monotonic() - began
            times["follower_released_s"] = time.monotonic() - began
            assert "first_line_s" in times, text

        await asyncio.gather(watch_state(), follow())
    return times


def measure(make, rounds):
    cluster = make()
    try:
        cluster.start_head()
        first_job(cluster.address)
        runs = [asyncio.run(one(cluster.address)) for _ in range(rounds)]
    finally:
        cluster.stop()
    return {k: spread([r[k] for r in runs]) for k in runs[0]}


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    write_result("submit", {"mobula": measure(Mobula, rounds), "ray 2.60.0": measure(Ray, rounds)})


main()

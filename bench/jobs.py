"""Jobs per second: `true` many times over REST, all submitted at once by clients that keep their
connections, until the last one is SUCCEEDED. Ray, which needs two seconds for each, gets fewer."""
import concurrent.futures
import http.client
import json
import sys
import time
import urllib.parse

from lib import Mobula, Ray, first_job, write_result

OURS, RAYS, CLIENTS = 1000, 20, 4


class Client:
    def __init__(self, address):
        self.connection = http.client.HTTPConnection(urllib.parse.urlsplit(address).netloc,
                                                     timeout=300)

    def call(self, method, path, body=None):
        self.connection.request(method, path, body, {"Content-Type": "application/json"})
        reply = self.connection.getresponse()
        text = reply.read()
        assert reply.status == 200, (reply.status, text)
        return json.loads(text)

    def submit(self, n):
        return [self.call("POST", "/api/jobs/", '{"entrypoint": "true"}')["submission_id"]
                for _ in range(n)]

    def wait(self, ids):
        for job_id in ids:
            while (status := self.call("GET", f"/api/jobs/{job_id}")["status"]) in (
                    "PENDING", "RUNNING"):
                time.sleep(0.01)
            assert status == "SUCCEEDED", status


def measure(cluster, n):
    clients = [Client(cluster.address) for _ in range(min(CLIENTS, n))]
    shares = [len(range(i, n, len(clients))) for i in range(len(clients))]
    try:
        cluster.start_head()
        first_job(cluster.address)
        with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:
            began = time.monotonic()
            ids = list(pool.map(Client.submit, clients, shares))
            list(pool.map(Client.wait, clients, ids))
            took = time.monotonic() - began
    finally:
        cluster.stop()
    return {"jobs": n, "seconds": round(took, 3), "jobs_per_s": round(n / took, 2)}


def main():
    ours, rays = (int(a) for a in sys.argv[1:3]) if len(sys.argv) > 2 else (OURS, RAYS)
    write_result("jobs", {"what": "entrypoint `true`; from the first submission to the last end",
                          "mobula": measure(Mobula(), ours), "ray 2.60.0": measure(Ray(), rays)})


main()

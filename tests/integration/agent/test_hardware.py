"""What Ray's dashboard shows of our machine: test_hardware.py BIN_DIR

CPU, memory, disk, network, our process and GPUs (of a stand-in for NVML; of AMD's by files of a driver
that are mounted over /sys/class, which needs root), page of one node and summary. Run by the Python of the Ray whose head and dashboard are used.
"""

import json
import os
import pathlib
import subprocess
import sys
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ports import free_port  # noqa: E402
from ray_head import RayHead, ray_version  # noqa: E402

BIN = sys.argv[1]
NVML = pathlib.Path(BIN).parent / "tests/unit/agent/fake_nvml"


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return json.loads(reply.read())["data"]
    except (urllib.error.URLError, ConnectionError):
        return {}  # the dashboard begins after its head


def amd_files(folder):
    """What the driver of two of AMD's devices says."""
    for i in range(2):
        node = folder / f"kfd/kfd/topology/nodes/{i + 1}"
        device = folder / f"drm/renderD{128 + i}/device"
        for path, text in (
                (node / "gpu_id", "28851"), (node / "properties", f"drm_render_minor {128 + i}"),
                (device / "product_name", "AMD Instinct MI300X OAM"),
                (device / "unique_id", f"8f3c5a1d2b4e6f7{i}"), (device / "gpu_busy_percent", "87"),
                (device / "mem_info_vram_total", str(192 << 30)),
                (device / "mem_info_vram_used", str((i + 1) << 30)),
                (device / "hwmon/hwmon3/power1_average", "512000000"),
                (device / "hwmon/hwmon3/temp1_input", "43000")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")


def amd(s, head, http):
    folder = pathlib.Path(s.dir, "sys-class")
    amd_files(folder)
    inside = ["unshare", "--mount", "sh", "-c", f'mount --bind {folder} /sys/class && exec "$@"', "sh"]
    if os.geteuid() != 0 or subprocess.run([*inside, "true"], stderr=subprocess.DEVNULL).returncode:
        print("SKIPPED: AMD's devices: no files can be mounted over /sys/class here", flush=True)
        return
    node = s.node(BIN, "--address", head.address, "--no-token", "--dashboard-agent-listen-port", "0",
                  inside=inside)
    node.wait_alive()
    gpus = cluster.wait_for("AMD's devices", lambda: get(f"{http}/{node.info['node_id']}").get(
        "detail", {}).get("gpus"))
    assert [(g["index"], g["name"], g["uuid"], g["utilizationGpu"], g["memoryUsed"],
             g["memoryTotal"], g["temperatureC"], g["powerMw"]) for g in gpus] == [
        (i, "AMD Instinct MI300X OAM", f"GPU-8f3c5a1d2b4e6f7{i}", 87, (i + 1) << 10, 192 << 10, 43,
         512000) for i in range(2)], gpus
    assert node.state()["resources_total"]["mobula_gpu"] == 2, node.state()
    assert "mobula_gpu_power_watts" in node.http("/metrics")
    assert node.stop() == 0
    print("ok   amd", flush=True)


def main():
    port = free_port()
    with cluster.Sandbox() as s, RayHead(args=["--include-dashboard=true",
                                               f"--dashboard-port={port}"]) as head:
        node = s.node(BIN, "--address", head.address, "--no-token",
                      env={"LD_LIBRARY_PATH": str(NVML)})
        node.wait_alive()
        node_id = node.info["node_id"]
        http = f"http://127.0.0.1:{port}/nodes"

        def shown():
            page = get(f"{http}/{node_id}").get("detail", {})
            return page if page.get("cpus") and page["cpu"] > 0 else None  # the second look

        page = cluster.wait_for("the machine's page", shown)
        if ray_version() >= (2, 60):  # as Ray's own reporter has to be
            from ray.dashboard.modules.reporter.reporter_models import StatsPayload
            StatsPayload(**{**page, "raylet": None})
        assert page["cpus"][0] == len(os.sched_getaffinity(0)) and 0 <= page["cpu"] <= 100, page
        total, available, percent, used = page["mem"]
        assert total > 1 << 28 and used + available == total and 0 < percent < 100, page["mem"]
        assert page["hostMem"][1] >= total, page
        (disk,) = page["disk"].values()
        stat = os.statvfs(node.dir)
        assert disk["total"] == stat.f_blocks * stat.f_frsize and disk["used"] > 0, disk
        assert len(page["network"]) == len(page["networkSpeed"]) == 2, page
        assert len(page["diskIo"]) == len(page["diskIoSpeed"]) == 4, page
        assert page["loadAvg"][0][0] >= 0 and page["bootTime"] > 1 << 30, page
        assert page["agent"]["memoryInfo"]["rss"] > 1 << 20, page["agent"]
        assert [(g["index"], g["name"], g["uuid"], g["utilizationGpu"], g["memoryTotal"],
                 g["temperatureC"], g["powerMw"]) for g in page["gpus"]] == [
            (i, "Fake H100", f"GPU-{i + 1}", 37, 81920, 61, 350000) for i in range(2)], page["gpus"]
        rows = [r for r in get(f"{http}?view=summary")["summary"]
                if r["raylet"]["nodeId"] == node_id]
        assert len(rows) == 1 and rows[0]["mem"][0] == total and len(rows[0]["gpus"]) == 2, rows
        assert node.stop() == 0
        print("ok   hardware", flush=True)
        amd(s, head, http)
    return 0


if __name__ == "__main__":
    sys.exit(main())

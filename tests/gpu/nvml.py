"""What the driver says of its GPUs: a view of our own, so that the agent is not its own witness."""

import ctypes
import threading
import time

MIB = 1 << 20
NO_GPU = 6, 9, 12  # not found, driver not loaded, library not found


class NvmlError(Exception):
    pass


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Nvml:
    """None of its methods changes a setting of a GPU."""

    def __init__(self):
        self._lib = ctypes.CDLL("libnvidia-ml.so.1")
        self._ask("nvmlInit_v2")
        count = ctypes.c_uint()
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self.count = count.value

    def _ask(self, name, *args):
        status = getattr(self._lib, name)(*args)
        if status != 0:
            raise NvmlError(f"{name}: {status}")

    def _handle(self, gpu):
        handle = ctypes.c_void_p()
        self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(gpu), ctypes.byref(handle))
        return handle

    def used_bytes(self, gpu=0):
        memory = _Memory()
        self._ask("nvmlDeviceGetMemoryInfo", self._handle(gpu), ctypes.byref(memory))
        return memory.used

    def _text(self, name, *before):
        text = ctypes.create_string_buffer(96)
        self._ask(name, *before, text, ctypes.c_uint(len(text)))
        return text.value.decode()

    def uuid(self, gpu=0):
        return self._text("nvmlDeviceGetUUID", self._handle(gpu))

    def name(self, gpu=0):
        return self._text("nvmlDeviceGetName", self._handle(gpu))

    def driver(self):
        return self._text("nvmlSystemGetDriverVersion")


def find():
    """The driver's view, or None where there is no GPU. A driver that is ill is an error."""
    try:
        nvml = Nvml()
    except OSError:
        return None
    except NvmlError as error:
        if str(error).rsplit(" ", 1)[1] in map(str, NO_GPU):
            return None
        raise
    return nvml if nvml.count > 0 else None


class Watch:
    """Samples the memory of a GPU every 2 ms in a thread of its own while a `with` block lasts."""

    def __init__(self, nvml, gpu=0):
        self._nvml, self._gpu = nvml, gpu
        self._done = threading.Event()
        self.samples = []  # (monotonic seconds, used bytes)
        self.error = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            while not self._done.is_set():
                used = self._nvml.used_bytes(self._gpu)
                self.samples.append((time.monotonic(), used))  # not later than this
                time.sleep(0.002)
        except NvmlError as error:
            self.error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join(30)

    def fell_at(self, limit_bytes):
        """When the memory in use was within the limit and stayed there; None: it is not."""
        assert self.error is None, self.error
        fell = None
        for at, used in self.samples:
            if used > limit_bytes:
                fell = None
            elif fell is None:
                fell = at
        return fell

/* libnvidia-ml.so.1 of the hollow GPU: what pynvml and PyTorch ask. */
#include <stdio.h>
#include <string.h>

#include "device.h"

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7 };

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };

static int device;

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "hollow"; }

int nvmlSystemGetDriverVersion(char *text, unsigned nbytes) { snprintf(text, nbytes, "580.0 (hollow)"); return SUCCESS; }
int nvmlSystemGetNVMLVersion(char *text, unsigned nbytes) { snprintf(text, nbytes, "13.580"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }
int nvmlDeviceGetCount(unsigned *count) { *count = 1; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = &device;
    return index ? INVALID : SUCCESS;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void **handle) { return nvmlDeviceGetHandleByIndex_v2(index, handle); }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &device;
    return strcmp(uuid, HOLLOW_UUID) ? INVALID : SUCCESS;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) { (void)bus; *handle = &device; return SUCCESS; }
int nvmlDeviceGetName(void *handle, char *text, unsigned nbytes) { (void)handle; snprintf(text, nbytes, "Hollow GPU"); return SUCCESS; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned nbytes) { (void)handle; snprintf(text, nbytes, HOLLOW_UUID); return SUCCESS; }
int nvmlDeviceGetIndex(void *handle, unsigned *index) { (void)handle; *index = 0; return SUCCESS; }
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) { (void)handle; (void)current; (void)pending; return NOT_SUPPORTED; }

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *found) {
    (void)handle;
    found->total = HOLLOW_TOTAL;
    found->used = hollow_used();
    found->free = found->total - found->used;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *found) {
    (void)handle;
    found->total = HOLLOW_TOTAL;
    found->used = hollow_used();
    found->reserved = 0;
    found->free = found->total - found->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *found) {
    (void)handle;
    unsigned room = *count, n = 0;
    for (int i = 0; i < HOLLOW_PROCESSES; i++) {
        struct hollow_process *one = hollow_processes() + i;
        if (!hollow_alive(one)) continue;
        if (found && n < room) found[n] = (struct process){(unsigned)one->pid, one->bytes, ~0u, ~0u};
        n++;
    }
    *count = n;
    return n > room || (n && !found) ? TOO_SMALL : SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, struct process *found) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, found);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, struct process *found) {
    (void)handle; (void)found; *count = 0; return SUCCESS;
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *found) {
    (void)handle; (void)found; *count = 0; return SUCCESS;
}

/* NVLink, of which there is none. */
int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) { (void)handle; (void)link; (void)type; return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *bus) { (void)handle; (void)link; (void)bus; return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, struct process *found) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, found);
}

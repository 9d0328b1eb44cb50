/* libnvidia-ml.so.1 of the hollow GPUs: what pynvml and PyTorch ask. */
#include <stdio.h>

#include "device.h"

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7 };

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };

static int devices[HOLLOW_DEVICES_MOST]; /* a handle is the address of its device's place */

static int index_of(void *handle) { return (int)((int *)handle - devices); }
static int found(int index, void **handle) {
    if (index < 0 || index >= HOLLOW_DEVICES) return INVALID;
    *handle = devices + index;
    return SUCCESS;
}

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "hollow"; }

int nvmlSystemGetDriverVersion(char *text, unsigned nbytes) { snprintf(text, nbytes, "580.0 (hollow)"); return SUCCESS; }
int nvmlSystemGetNVMLVersion(char *text, unsigned nbytes) { snprintf(text, nbytes, "13.580"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }
int nvmlDeviceGetCount(unsigned *count) { *count = (unsigned)HOLLOW_DEVICES; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)HOLLOW_DEVICES; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return found((int)index, handle); }
int nvmlDeviceGetHandleByIndex(unsigned index, void **handle) { return found((int)index, handle); }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    int index = -1;
    return sscanf(uuid, HOLLOW_UUID, &index) == 1 ? found(index, handle) : INVALID;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
    int domain, index = -1;
    return sscanf(bus, "%x:%x", &domain, &index) == 2 ? found(index - 1, handle) : INVALID;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned nbytes) { (void)handle; snprintf(text, nbytes, "Hollow GPU"); return SUCCESS; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned nbytes) { snprintf(text, nbytes, HOLLOW_UUID, index_of(handle)); return SUCCESS; }
int nvmlDeviceGetIndex(void *handle, unsigned *index) { *index = (unsigned)index_of(handle); return SUCCESS; }
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) { (void)handle; (void)current; (void)pending; return NOT_SUPPORTED; }

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *found) {
    found->total = HOLLOW_TOTAL;
    found->used = hollow_used(index_of(handle));
    found->free = found->total - found->used;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *found) {
    found->total = HOLLOW_TOTAL;
    found->used = hollow_used(index_of(handle));
    found->reserved = 0;
    found->free = found->total - found->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *found) {
    unsigned room = *count, n = 0;
    int device = index_of(handle);
    for (int i = 0; i < HOLLOW_PROCESSES; i++) {
        struct hollow_process *one = hollow_processes() + i;
        if (!hollow_alive(one, device)) continue;
        if (found && n < room) found[n] = (struct process){(unsigned)one->pid, one->bytes[device], ~0u, ~0u};
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

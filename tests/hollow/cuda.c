/* The CUDA runtime and the driver's memory calls, of GPUs that have no processor.

   Put before the real libraries (LD_PRELOAD), so that a stock PyTorch for CUDA runs whole, its caching allocator
   included, on a machine without a GPU. Memory is the host's, mapped where the program's own driver calls map it and
   nowhere else, and accounted for as the driver does, in pages of 2 MiB. Kernels do nothing: what they would compute,
   compute.cpp does. Without it (HOLLOW_COMPUTE), memory takes no place and reads as zeros. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "hollow.h"

#define PAGE (2ull << 20)
#define HANDLE (20ull << 20) /* of an expandable segment */
#define ROUNDED(n) (((n) + PAGE - 1) / PAGE * PAGE)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hollow_process *own;
static __thread cudaError_t last;
__thread int hollow_current;
__thread int hollow_inside;
__thread int hollow_launched;

cudaError_t hollow_failed(cudaError_t error) { return last = error; }

int hollow_computes(void) {
    static int known = -1;
    if (known < 0) {
        const char *library = getenv("HOLLOW_COMPUTE");
        known = library && *library;
    }
    return known;
}

/* -- the account ------------------------------------------------------------------------------- */

static int visible[HOLLOW_DEVICES_MOST], visible_count = -1; /* CUDA_VISIBLE_DEVICES, by index or UUID */

static int devices(void) {
    pthread_mutex_lock(&lock);
    if (visible_count < 0) {
        const char *named = getenv("CUDA_VISIBLE_DEVICES");
        char names[256];
        snprintf(names, sizeof names, "%s", named ? named : "");
        visible_count = 0;
        if (!named)
            for (; visible_count < HOLLOW_DEVICES; visible_count++) visible[visible_count] = visible_count;
        for (char *rest = names, *name; named && (name = strsep(&rest, ","));) {
            int index;
            if (sscanf(name, HOLLOW_UUID, &index) != 1 && sscanf(name, "%d", &index) != 1) break;
            if (index < 0 || index >= HOLLOW_DEVICES) break;
            visible[visible_count++] = index;
        }
    }
    pthread_mutex_unlock(&lock);
    return visible_count;
}

static struct hollow_process *self(void) {
    pid_t pid = getpid();
    if (own && own->pid == pid) return own;
    struct hollow_process *table = hollow_processes();
    for (int i = 0; i < HOLLOW_PROCESSES; i++) {
        struct hollow_process *one = table + i;
        if (one->pid == 0 || kill(one->pid, 0) != 0) {
            *one = (struct hollow_process){.pid = pid};
            return own = one;
        }
    }
    abort();
}

static uint64_t peaks[HOLLOW_DEVICES_MOST];

/* For tests, by ctypes: the most that the driver has shown for this process since the last call, in bytes. */
uint64_t hollow_peak(int device) {
    pthread_mutex_lock(&lock);
    uint64_t peak = peaks[device];
    peaks[device] = self()->bytes[device];
    pthread_mutex_unlock(&lock);
    return peak;
}

/* The first call for a device makes a context there. */
static int take(int device, uint64_t nbytes) {
    pthread_mutex_lock(&lock);
    struct hollow_process *mine = self();
    if (!mine->bytes[device]) mine->bytes[device] = HOLLOW_CONTEXT;
    int fits = hollow_used(device) + nbytes <= HOLLOW_TOTAL;
    if (fits) mine->bytes[device] += nbytes;
    if (mine->bytes[device] > peaks[device]) peaks[device] = mine->bytes[device];
    pthread_mutex_unlock(&lock);
    return fits;
}

static void give_back(int device, uint64_t nbytes) {
    pthread_mutex_lock(&lock);
    self()->bytes[device] -= nbytes;
    pthread_mutex_unlock(&lock);
}

static int here(void) { devices(); return visible[hollow_current]; }

/* -- memory ------------------------------------------------------------------------------------ */

/* What a program reads before it has written it: HOLLOW_POISON, by default 255, of which floats are not numbers. */
static void poison(void *at, uint64_t nbytes) { memset(at, (int)hollow_number("HOLLOW_POISON", 255), nbytes); }

static void *addresses(uint64_t nbytes, int may) {
    void *at = mmap(NULL, nbytes, may, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

/* Addresses of the device's: allocated ones, and those reserved for pages. */
struct piece { char *at; uint64_t nbytes; int device, index; struct piece *next; };
static struct piece *pieces;

static void add(void *at, uint64_t nbytes, int device) {
    struct piece *piece = malloc(sizeof *piece);
    pthread_mutex_lock(&lock);
    *piece = (struct piece){at, nbytes, device, hollow_current, pieces};
    pieces = piece;
    pthread_mutex_unlock(&lock);
}

static struct piece *removed(void *at) {
    pthread_mutex_lock(&lock);
    struct piece **link = &pieces;
    while (*link && (*link)->at != at) link = &(*link)->next;
    struct piece *piece = *link;
    if (piece) *link = piece->next;
    pthread_mutex_unlock(&lock);
    return piece;
}

static int device_of(const void *at) { /* -1: the host's */
    int found = -1;
    pthread_mutex_lock(&lock);
    for (struct piece *piece = pieces; piece && found < 0; piece = piece->next)
        if ((const char *)at >= piece->at && (const char *)at < piece->at + piece->nbytes) found = piece->index;
    pthread_mutex_unlock(&lock);
    return found;
}

int hollow_on_device(const void *at) { return device_of(at) >= 0; }

cudaError_t cudaMalloc(void **found, size_t nbytes) {
    uint64_t taken = ROUNDED(nbytes);
    *found = NULL;
    if (!nbytes) return cudaSuccess;
    hollow_spend(100000);
    if (!take(here(), taken)) return hollow_failed(cudaErrorMemoryAllocation);
    *found = addresses(taken, hollow_computes() ? PROT_READ | PROT_WRITE : PROT_READ);
    if (!*found) abort();
    if (hollow_computes()) poison(*found, taken);
    add(*found, taken, here());
    return cudaSuccess;
}

cudaError_t cudaFree(void *at) {
    if (!at) { take(here(), 0); return cudaSuccess; }
    struct piece *piece = removed(at);
    if (!piece) return hollow_failed(cudaErrorInvalidValue);
    cudaDeviceSynchronize(); /* as it does */
    hollow_race_unmap(at, piece->nbytes);
    munmap(at, piece->nbytes);
    give_back(piece->device, piece->nbytes);
    free(piece);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **found, size_t nbytes, cudaStream_t stream) { (void)stream; return cudaMalloc(found, nbytes); }
cudaError_t cudaFreeAsync(void *at, cudaStream_t stream) { (void)stream; return cudaFree(at); }

cudaError_t cudaMemGetInfo(size_t *free_, size_t *total) {
    take(here(), 0);
    hollow_spend(10000);
    *total = HOLLOW_TOTAL;
    *free_ = *total - hollow_used(here());
    return cudaSuccess;
}

/* Rows of a copy, or of what is set where `from` is NULL. */
struct rows { char *to; const char *from; size_t to_pitch, from_pitch, width, height; int value; };

static void copy(const struct rows *rows, void *stream) {
    if (!rows->width || !rows->height) return;
    hollow_race_copy(rows->to, rows->from, rows->to_pitch * (rows->height - 1) + rows->width, stream,
                     rows->from ? "a copy" : "a fill");
    for (size_t row = 0; row < rows->height; row++) {
        char *to = rows->to + row * rows->to_pitch;
        if (rows->from) memmove(to, rows->from + row * rows->from_pitch, rows->width);
        else memset(to, rows->value, rows->width);
    }
}
static void copy_again(void *rows, void *stream) { copy(rows, stream); }

/* Pinned memory of the host. */
static struct { const char *at; size_t nbytes; } pinned[256];
static pthread_mutex_t pinning = PTHREAD_MUTEX_INITIALIZER;

static void pin(const char *at, size_t nbytes, const char *instead_of) {
    pthread_mutex_lock(&pinning);
    for (size_t i = 0; i < sizeof pinned / sizeof *pinned; i++)
        if (pinned[i].at == instead_of) {
            pinned[i].at = at;
            pinned[i].nbytes = nbytes;
            break;
        }
    pthread_mutex_unlock(&pinning);
}
static int is_pinned(const char *at) {
    int found = 0;
    pthread_mutex_lock(&pinning);
    for (size_t i = 0; i < sizeof pinned / sizeof *pinned; i++)
        found |= pinned[i].at <= at && at < pinned[i].at + pinned[i].nbytes;
    pthread_mutex_unlock(&pinning);
    return found;
}

/* On an H200: memory is written at 4 TB/s, and copied from or to the host at 20 GB/s. The host waits for what comes to its memory
   unless that is pinned. */
static void take_time(const struct rows *rows, void *stream) {
    int64_t nbytes = (int64_t)(rows->width * rows->height);
    int local = hollow_on_device(rows->to), within = !rows->from || hollow_on_device(rows->from);
    hollow_launch(stream, local && within ? nbytes * (rows->from ? 2 : 1) / 4000 : nbytes / 20);
    if (!local && !is_pinned(rows->to)) cudaStreamSynchronize(stream);
}

static cudaError_t copied(struct rows rows, void *stream) {
    if (hollow_keeps_time()) take_time(&rows, stream);
    if (!hollow_computes()) {
        /* What the program reads is zero. Large copies to pinned memory are the host tier's: they would take the processor's time,
           which a GPU does not. */
        int is_kept = rows.width * rows.height > 1 << 16 && is_pinned(rows.to);
        if (!hollow_on_device(rows.to) && !is_kept)
            for (size_t row = 0; row < rows.height; row++) memset(rows.to + row * rows.to_pitch, 0, rows.width);
        return cudaSuccess;
    }
    if (hollow_inside && hollow_on_device(rows.to)) return cudaSuccess; /* compute.cpp writes what comes of it */
    if (!hollow_captures(stream)) {
        copy(&rows, stream);
        return cudaSuccess;
    }
    struct rows *kept = malloc(sizeof *kept);
    *kept = rows;
    hollow_capture(stream, copy_again, free, kept);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    return copied((struct rows){to, from, nbytes, nbytes, nbytes, 1, 0}, stream);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind) {
    cudaMemcpyAsync(to, from, nbytes, kind, NULL);
    return cudaStreamSynchronize(NULL);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here_, size_t nbytes, cudaStream_t stream) {
    (void)there; (void)here_;
    return cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t other, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    return copied((struct rows){to, from, pitch, other, width, height, 0}, stream);
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t nbytes, cudaStream_t stream) {
    return copied((struct rows){to, NULL, nbytes, nbytes, nbytes, 1, value}, stream);
}
cudaError_t cudaMemset(void *to, int value, size_t nbytes) { return cudaMemsetAsync(to, value, nbytes, NULL); }

cudaError_t cudaHostAlloc(void **found, size_t nbytes, unsigned flags) {
    (void)flags;
    if (posix_memalign(found, 4096, nbytes ? nbytes : 1)) return hollow_failed(cudaErrorMemoryAllocation);
    pin(*found, nbytes, NULL);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *at) {
    pin(NULL, 0, at);
    free(at);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    int device = device_of(at);
    memset(found, 0, sizeof *found);
    found->type = device < 0 ? cudaMemoryTypeUnregistered : cudaMemoryTypeDevice;
    found->device = device < 0 ? 0 : device;
    found->devicePointer = (void *)at;
    return cudaSuccess;
}

/* -- memory by pages (expandable segments) ------------------------------------------------------ */

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t nbytes, size_t align, CUdeviceptr wish, unsigned long long flags) {
    (void)align; (void)wish; (void)flags;
    void *found = addresses(nbytes + PAGE, hollow_computes() ? PROT_NONE : PROT_READ);
    if (!found) return CUDA_ERROR_OUT_OF_MEMORY;
    *at = ROUNDED((uint64_t)found);
    add((void *)*at, nbytes, here());
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t nbytes) {
    free(removed((void *)at));
    munmap((void *)at, nbytes);
    return CUDA_SUCCESS;
}

struct handle { uint64_t nbytes; int device; };

CUresult cuMemCreate(CUmemGenericAllocationHandle *made, size_t nbytes, const CUmemAllocationProp *prop, unsigned long long flags) {
    (void)flags;
    devices();
    int device = visible[prop->location.id];
    hollow_spend(24000);
    if (!take(device, nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct handle *handle = malloc(sizeof *handle);
    *handle = (struct handle){nbytes, device};
    *made = (CUmemGenericAllocationHandle)(uintptr_t)handle;
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle released) {
    struct handle *handle = (void *)(uintptr_t)released;
    hollow_spend(33000);
    give_back(handle->device, handle->nbytes);
    free(handle);
    return CUDA_SUCCESS;
}

/* Memory is where it is mapped, and a touch of any other address is a fault. */
static CUresult mapped(CUdeviceptr at, size_t nbytes, int may) {
    if (!hollow_computes()) return CUDA_SUCCESS;
    void *found = mmap((void *)at, nbytes, may, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    if (may != PROT_NONE) poison(found, nbytes);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t n, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    (void)offset; (void)handle; (void)flags;
    hollow_spend(5000);
    return mapped(at, n, PROT_READ | PROT_WRITE);
}
CUresult cuMemUnmap(CUdeviceptr at, size_t nbytes) {
    hollow_race_unmap((void *)at, nbytes);
    hollow_spend(25000);
    return mapped(at, nbytes, PROT_NONE);
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t nbytes, const CUmemAccessDesc *desc, size_t count) {
    (void)at; (void)desc; (void)count;
    hollow_spend(37000 * (int64_t)((nbytes + HANDLE - 1) / HANDLE));
    return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t *found, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
    (void)prop; (void)option;
    *found = PAGE;
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the hollow GPU";
    return CUDA_SUCCESS;
}
CUresult cuInit(unsigned flags) { (void)flags; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = devices(); return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem_v2(size_t *found, CUdevice device) { (void)device; *found = HOLLOW_TOTAL; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *found, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    return (CUresult)cudaDeviceGetAttribute(found, (enum cudaDeviceAttr)attribute, 0);
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&lock; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    devices();
    *flags = 0;
    *active = own && own->pid == getpid() && own->bytes[visible[device]];
    return CUDA_SUCCESS;
}
static CUresult not_modelled(void) { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    (void)version; (void)flags;
    *found = dlsym(RTLD_DEFAULT, name);
    if (!*found) *found = (void *)not_modelled;
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* -- the device -------------------------------------------------------------------------------- */

static void load_operators(void) { /* compute.cpp, timed.cpp */
    const char *library = hollow_keeps_time() ? getenv("HOLLOW_TIMED") : hollow_computes() ? getenv("HOLLOW_COMPUTE") : NULL;
    if (!library || dlopen(library, RTLD_NOW | RTLD_GLOBAL)) return;
    fprintf(stderr, "hollow: %s\n", dlerror());
    abort();
}

cudaError_t cudaGetDeviceCount(int *count) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    *count = devices();
    if (!*count) return hollow_failed(cudaErrorNoDevice);
    pthread_once(&once, load_operators);
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *index) { *index = hollow_current; return cudaSuccess; }
cudaError_t cudaSetDevice(int index) {
    if (index < 0 || index >= devices()) return hollow_failed(cudaErrorInvalidDevice);
    hollow_current = index;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { (void)one; (void)other; *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int nbytes, int device) {
    devices();
    snprintf(text, (size_t)nbytes, "0000:%02x:00.0", visible[device] + 1);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    devices();
    memset(found, 0, sizeof *found);
    strcpy(found->name, "Hollow GPU");
    memcpy(found->uuid.bytes, "hollowgpu", 9);
    found->uuid.bytes[15] = (char)visible[device];
    found->pciBusID = visible[device] + 1;
    found->totalGlobalMem = HOLLOW_TOTAL;
    found->major = (int)hollow_number("HOLLOW_MAJOR", 8); /* 9: scaled_dot_product_attention takes cuDNN, which is not modelled */
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 0x7fffffff;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxBlocksPerMultiProcessor = 32;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 48 << 10;
    found->sharedMemPerBlockOptin = 227 << 10;
    found->sharedMemPerMultiprocessor = 228 << 10;
    found->l2CacheSize = 50 << 20;
    found->textureAlignment = 512;
    found->unifiedAddressing = found->concurrentKernels = 1;
    found->memoryBusWidth = 6144;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *found, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp prop;
    (void)device;
    cudaGetDeviceProperties(&prop, 0);
    switch ((int)attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *found = prop.maxThreadsPerBlock; break;
        case cudaDevAttrMultiProcessorCount: *found = prop.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *found = prop.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *found = (int)prop.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *found = (int)prop.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *found = (int)prop.sharedMemPerMultiprocessor; break;
        case cudaDevAttrWarpSize: *found = 32; break;
        case cudaDevAttrComputeCapabilityMajor: *found = prop.major; break;
        case cudaDevAttrMaxGridDimX: *found = prop.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *found = 65535; break;
        case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *found = 1024; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *found = 32; break;
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *found = 1; break;
        default: *found = 0;
    }
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : error ? "an error of the hollow GPU" : "no error";
}
const char *cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "hollow"; }
cudaError_t cudaGetLastError(void) { cudaError_t error = last; last = cudaSuccess; return error; }
cudaError_t cudaPeekAtLastError(void) { return last; }

/* -- kernels ------------------------------------------------------------------------------------ */

#define LAUNCHED 65536
static const void *launched[LAUNCHED];

/* The first launch loads the kernel, which takes memory of the device. timed.cpp knows how long those of an operator run. */
static cudaError_t launch(const void *kernel, void *stream) {
    if (!hollow_inside) hollow_launch(stream, 2000);
    else if (hollow_launched++) hollow_spend(HOLLOW_LAUNCH_NS);
    pthread_mutex_lock(&lock);
    size_t place = ((uintptr_t)kernel >> 4) % LAUNCHED;
    while (launched[place] && launched[place] != kernel) place = (place + 1) % LAUNCHED;
    int first = !launched[place];
    launched[place] = kernel;
    pthread_mutex_unlock(&lock);
    return first && !take(here(), HOLLOW_KERNEL) ? hollow_failed(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    (void)shared;
    /* torch.cuda._sleep: its kernel is the only one of a single thread that no operator launches. At 1.7 GHz. */
    if (hollow_keeps_time() && !hollow_inside && grid.x * block.x == 1) hollow_launch(stream, (int64_t)(*(int64_t *)*args / 1.7));
    return launch(kernel, stream);
}
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **args) {
    (void)args;
    return launch(kernel, config->stream);
}
cudaError_t __cudaGetKernel(void **found, const void *entry_) { *found = (void *)entry_; return cudaSuccess; }

static __thread struct { dim3 grid, block; size_t shared; void *stream; } call;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    call.grid = grid;
    call.block = block;
    call.shared = shared;
    call.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = call.grid;
    *block = call.block;
    *shared = call.shared;
    *(void **)stream = call.stream;
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) { static void *made; (void)binary; return &made; }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    (void)kernel;
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->ptxVersion = found->binaryVersion = 90;
    found->maxDynamicSharedSizeBytes = 227 << 10;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *found, const void *kernel, int block, size_t shared, unsigned flags) {
    (void)kernel; (void)block; (void)shared; (void)flags;
    *found = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *found, const void *kernel, int block, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(found, kernel, block, shared, 0);
}
cudaError_t cudaGetSymbolAddress(void **found, const void *symbol) { *found = (void *)symbol; return cudaSuccess; }

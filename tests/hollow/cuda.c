/* The CUDA runtime and the driver's memory calls, of a GPU that computes nothing and whose memory reads as zeros.

   Put before the real libraries (LD_PRELOAD), so that a stock PyTorch for CUDA runs whole, its caching allocator
   included, on a machine without a GPU. Everything is done at once; what was asked for is accounted for as the
   driver does, in pages of 2 MiB. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "device.h"

#define PAGE (2ull << 20)
#define ROUNDED(n) (((n) + PAGE - 1) / PAGE * PAGE)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hollow_process *own;
static __thread cudaError_t last;

/* -- the account ------------------------------------------------------------------------------- */

static struct hollow_process *self(void) {
    pid_t pid = getpid();
    if (own && own->pid == pid) return own;
    struct hollow_process *table = hollow_processes();
    for (int i = 0; i < HOLLOW_PROCESSES; i++) {
        struct hollow_process *one = table + i;
        if (one->pid == 0 || kill(one->pid, 0) != 0) {
            *one = (struct hollow_process){.pid = pid, .bytes = HOLLOW_CONTEXT};
            return own = one;
        }
    }
    abort();
}

static int take(uint64_t nbytes) {
    pthread_mutex_lock(&lock);
    struct hollow_process *mine = self();
    int fits = hollow_used() + nbytes <= HOLLOW_TOTAL;
    if (fits) mine->bytes += nbytes;
    pthread_mutex_unlock(&lock);
    return fits;
}

static void give_back(uint64_t nbytes) {
    pthread_mutex_lock(&lock);
    self()->bytes -= nbytes;
    pthread_mutex_unlock(&lock);
}

static cudaError_t failed(cudaError_t error) { return last = error; }

/* -- memory ------------------------------------------------------------------------------------ */

static void *addresses(uint64_t nbytes) {
    void *at = mmap(NULL, nbytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

struct piece { void *at; uint64_t nbytes; struct piece *next; };
static struct piece *pieces;

cudaError_t cudaMalloc(void **found, size_t nbytes) {
    uint64_t taken = ROUNDED(nbytes);
    *found = NULL;
    if (!nbytes) return cudaSuccess;
    if (!take(taken)) return failed(cudaErrorMemoryAllocation);
    struct piece *piece = malloc(sizeof *piece);
    *piece = (struct piece){addresses(taken), taken, NULL};
    if (!piece->at) abort();
    pthread_mutex_lock(&lock);
    piece->next = pieces;
    pieces = piece;
    pthread_mutex_unlock(&lock);
    *found = piece->at;
    return cudaSuccess;
}

cudaError_t cudaFree(void *at) {
    if (!at) { take(0); return cudaSuccess; }
    pthread_mutex_lock(&lock);
    struct piece **link = &pieces;
    while (*link && (*link)->at != at) link = &(*link)->next;
    struct piece *piece = *link;
    if (piece) *link = piece->next;
    pthread_mutex_unlock(&lock);
    if (!piece) return failed(cudaErrorInvalidValue);
    munmap(at, piece->nbytes);
    give_back(piece->nbytes);
    free(piece);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **found, size_t nbytes, cudaStream_t stream) { (void)stream; return cudaMalloc(found, nbytes); }
cudaError_t cudaFreeAsync(void *at, cudaStream_t stream) { (void)stream; return cudaFree(at); }

cudaError_t cudaMemGetInfo(size_t *free_, size_t *total) {
    take(0);
    *total = HOLLOW_TOTAL;
    *free_ = *total - hollow_used();
    return cudaSuccess;
}

static cudaError_t copied(void *to, size_t nbytes, enum cudaMemcpyKind kind) {
    if (kind == cudaMemcpyDeviceToHost) memset(to, 0, nbytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind) { (void)from; return copied(to, nbytes, kind); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)from; (void)stream;
    return copied(to, nbytes, kind);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t other, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)from; (void)other; (void)stream;
    for (size_t row = 0; row < height; row++) copied((char *)to + row * pitch, width, kind);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **found, size_t nbytes, unsigned flags) {
    (void)flags;
    return posix_memalign(found, 4096, nbytes ? nbytes : 1) ? failed(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaFreeHost(void *at) { free(at); return cudaSuccess; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeUnregistered;
    pthread_mutex_lock(&lock);
    for (struct piece *piece = pieces; piece; piece = piece->next)
        if ((const char *)at >= (char *)piece->at && (const char *)at < (char *)piece->at + piece->nbytes)
            found->type = cudaMemoryTypeDevice;
    pthread_mutex_unlock(&lock);
    found->devicePointer = (void *)at;
    return cudaSuccess;
}

/* -- memory by pages (expandable segments) ------------------------------------------------------ */

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t nbytes, size_t align, CUdeviceptr wish, unsigned long long flags) {
    (void)align; (void)wish; (void)flags;
    char *found = mmap(NULL, nbytes + PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *at = ROUNDED((uint64_t)found);
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t nbytes) { munmap((void *)at, nbytes); return CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *prop, unsigned long long flags) {
    (void)prop; (void)flags;
    if (!take(nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t *size = malloc(sizeof *size);
    *size = nbytes;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)size;
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    give_back(*(uint64_t *)(uintptr_t)handle);
    free((void *)(uintptr_t)handle);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t n, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    (void)at; (void)n; (void)offset; (void)handle; (void)flags;
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t nbytes) { (void)at; (void)nbytes; return CUDA_SUCCESS; }
CUresult cuMemSetAccess(CUdeviceptr at, size_t nbytes, const CUmemAccessDesc *desc, size_t count) {
    (void)at; (void)nbytes; (void)desc; (void)count;
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
CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *found, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    return (CUresult)cudaDeviceGetAttribute(found, (enum cudaDeviceAttr)attribute, 0);
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&lock; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = own != NULL;
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

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *index) { *index = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int index) { return index ? failed(cudaErrorInvalidDevice) : cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { (void)one; (void)other; *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int nbytes, int device) {
    (void)device;
    snprintf(text, (size_t)nbytes, "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    (void)device;
    memset(found, 0, sizeof *found);
    strcpy(found->name, "Hollow GPU");
    memcpy(found->uuid.bytes, "hollowgpu", 9);
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

/* -- streams and events ------------------------------------------------------------------------- */

static __thread int capturing;
static __thread cudaStream_t captured;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags; (void)priority;
    *stream = malloc(64);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { free(stream); return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { (void)stream; *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    (void)flags;
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { (void)stream; call(data); return cudaSuccess; }

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    (void)mode;
    capturing = 1;
    captured = stream;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    (void)stream;
    capturing = 0;
    *graph = malloc(64);
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = capturing && stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    (void)edges;
    if (id) *id = 1;
    if (graph) *graph = NULL;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    (void)graph; (void)flags;
    *made = malloc(64);
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    (void)graph; (void)nodes;
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    *event = calloc(1, sizeof(struct timespec));
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)stream; (void)flags;
    clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    struct timespec *one = (struct timespec *)start, *other = (struct timespec *)end;
    *ms = (float)(other->tv_sec - one->tv_sec) * 1e3f + (float)(other->tv_nsec - one->tv_nsec) / 1e6f;
    return cudaSuccess;
}

/* -- kernels ------------------------------------------------------------------------------------ */

#define LAUNCHED 65536
static const void *launched[LAUNCHED];

/* The first launch loads the kernel, which takes memory of the device. */
static cudaError_t launch(const void *kernel) {
    pthread_mutex_lock(&lock);
    size_t place = ((uintptr_t)kernel >> 4) % LAUNCHED;
    while (launched[place] && launched[place] != kernel) place = (place + 1) % LAUNCHED;
    int first = !launched[place];
    launched[place] = kernel;
    pthread_mutex_unlock(&lock);
    return first && !take(HOLLOW_KERNEL) ? failed(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    (void)grid; (void)block; (void)args; (void)shared; (void)stream;
    return launch(kernel);
}
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **args) {
    (void)config; (void)args;
    return launch(kernel);
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

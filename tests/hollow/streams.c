/* Streams, events, and graphs of the hollow GPU: everything is done at once, in the order in which the host asks.

   A graph is the list of what was asked of its streams while they were captured (operators by compute.cpp, copies by
   cuda.c), and is gone through again when it is launched. */
#include <string.h>

#include "hollow.h"

struct node { void (*run)(void *data, void *stream); void (*drop)(void *data); void *data; };
struct graph { int users; size_t count, room; struct node *nodes; };
struct capture { unsigned long long id; void *origin; struct graph *graph; struct capture *next; };
struct stream { struct stream *next; struct capture *capture; };
struct event { int64_t when; struct hollow_clock at; struct capture *capture; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *streams;

/* -- streams ------------------------------------------------------------------------------------ */

static struct stream *known(cudaStream_t stream) { /* none of the default ones, which are never captured */
    return (uintptr_t)stream > 2 ? (struct stream *)stream : NULL;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
    (void)flags; (void)priority;
    struct stream *one = calloc(1, sizeof *one);
    pthread_mutex_lock(&lock);
    one->next = streams;
    streams = one;
    pthread_mutex_unlock(&lock);
    *made = (cudaStream_t)one;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) { return cudaStreamCreateWithPriority(made, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *made) { return cudaStreamCreateWithPriority(made, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { (void)stream; return cudaSuccess; } /* its address is not used again */
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { (void)stream; *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    (void)flags;
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { (void)stream; call(data); return cudaSuccess; }

static long waits;
long hollow_waits(void) { return __atomic_load_n(&waits, __ATOMIC_RELAXED); } /* for tests.bench.gpu_steps */

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    __atomic_add_fetch(&waits, 1, __ATOMIC_RELAXED);
    if (hollow_captures(stream)) return hollow_failed(cudaErrorStreamCaptureUnsupported);
    if (hollow_keeps_time()) hollow_wait_until(hollow_done(stream));
    if (hollow_checks_races()) hollow_host_waits_for_stream(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (hollow_keeps_time() && !hollow_is_over(hollow_done(stream))) return cudaErrorNotReady;
    if (!hollow_checks_races()) return cudaSuccess;
    if (hollow_checks_races() < 2) { hollow_host_waits_for_stream(stream); return cudaSuccess; }
    struct hollow_clock now;
    hollow_record(&now, stream);
    return hollow_host_has_waited_for(&now) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaDeviceSynchronize(void) {
    if (hollow_keeps_time()) hollow_wait_for_device();
    if (hollow_checks_races()) hollow_host_waits_for_device();
    return cudaSuccess;
}

/* -- events ------------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) {
    (void)flags;
    *made = calloc(1, sizeof(struct event));
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *made) { return cudaEventCreateWithFlags(made, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    struct event *one = (struct event *)event;
    (void)flags;
    one->when = hollow_done(stream);
    hollow_spend(HOLLOW_LAUNCH_NS);
    one->capture = known(stream) ? known(stream)->capture : NULL;
    if (hollow_checks_races()) hollow_record(&one->at, stream);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    struct event *one = (struct event *)event;
    (void)flags;
    if (one->capture && known(stream)) known(stream)->capture = one->capture; /* it joins the capture */
    if (hollow_keeps_time()) hollow_stream_waits_until(stream, one->when);
    if (hollow_checks_races()) hollow_stream_waits_for(stream, &one->at);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (hollow_keeps_time()) hollow_wait_until(((struct event *)event)->when);
    if (hollow_checks_races()) hollow_host_waits_for(&((struct event *)event)->at);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (hollow_keeps_time() && !hollow_is_over(((struct event *)event)->when)) return cudaErrorNotReady;
    if (hollow_checks_races() < 2) return cudaEventSynchronize(event);
    return hollow_host_has_waited_for(&((struct event *)event)->at) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    *ms = (float)(((struct event *)end)->when - ((struct event *)start)->when) / 1e6f;
    return cudaSuccess;
}

/* -- graphs ------------------------------------------------------------------------------------- */

int hollow_captures(void *stream) { return known(stream) && known(stream)->capture; }

void hollow_capture(void *stream, void (*run)(void *, void *), void (*drop)(void *), void *data) {
    struct graph *graph = known(stream)->capture->graph;
    pthread_mutex_lock(&lock);
    if (graph->count == graph->room) {
        graph->room = graph->room ? 2 * graph->room : 64;
        graph->nodes = realloc(graph->nodes, graph->room * sizeof *graph->nodes);
    }
    graph->nodes[graph->count++] = (struct node){run, drop, data};
    pthread_mutex_unlock(&lock);
}

static void drop(struct graph *graph) {
    if (--graph->users) return;
    for (size_t i = 0; i < graph->count; i++) graph->nodes[i].drop(graph->nodes[i].data);
    free(graph->nodes);
    free(graph);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    static unsigned long long captures;
    (void)mode;
    if (!known(stream)) return hollow_failed(cudaErrorStreamCaptureUnsupported);
    struct capture *one = calloc(1, sizeof *one); /* kept: an event may still name it */
    *one = (struct capture){++captures, stream, calloc(1, sizeof(struct graph)), NULL};
    one->graph->users = 1;
    known(stream)->capture = one;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    struct capture *ended = known(stream)->capture;
    pthread_mutex_lock(&lock);
    for (struct stream *one = streams; one; one = one->next)
        if (one->capture == ended) one->capture = NULL;
    pthread_mutex_unlock(&lock);
    *graph = (cudaGraph_t)ended->graph;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = hollow_captures(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    (void)edges;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    if (hollow_captures(stream)) {
        if (id) *id = known(stream)->capture->id;
        if (graph) *graph = (cudaGraph_t)known(stream)->capture->graph;
    }
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    ((struct graph *)graph)->users++;
    *made = (cudaGraphExec_t)graph;
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { drop((struct graph *)graph); return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { drop((struct graph *)graph); return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    (void)nodes;
    *count = hollow_computes() ? ((struct graph *)graph)->count : 1; /* without values nothing is noted */
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    struct graph *graph = (struct graph *)exec;
    for (size_t i = 0; i < graph->count; i++) graph->nodes[i].run(graph->nodes[i].data, stream);
    return cudaSuccess;
}

/* What the parts of libhollow.so tell each other. */
#ifndef HOLLOW_H
#define HOLLOW_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <time.h>

#include "device.h"

/* cuda.c */
extern __thread int hollow_current;         /* this thread's device */
extern __thread int hollow_inside;          /* how deep it is in operators that compute.cpp will compute */
extern __thread int hollow_launched;        /* kernels since timed.cpp has asked last */
int hollow_computes(void);                  /* whether memory has values (HOLLOW_COMPUTE) */
int hollow_on_device(const void* at);
cudaError_t hollow_failed(cudaError_t error);

/* clock.c: times in ns. What a launch takes the host beyond its instructions, and the GPU between two kernels; how many
   times slower than this machine the one with the H200 is (`python -m tests.bench device_clock` shows both). */
#define HOLLOW_LAUNCH_NS 5000
#define HOLLOW_GAP_NS 1000
#define HOLLOW_HOST 3.9
int hollow_keeps_time(void);
void hollow_spend(int64_t ns);
void hollow_launch(void* stream, int64_t ns);
int64_t hollow_done(void* stream);
void hollow_wait_until(int64_t when);
int hollow_is_over(int64_t when);
void hollow_stream_waits_until(void* stream, int64_t when);
void hollow_wait_for_device(void);

/* races.c */
#define HOLLOW_STREAMS 64
struct hollow_clock {
  uint32_t of[HOLLOW_STREAMS];
};
int hollow_checks_races(void);
uint32_t hollow_begin(void* stream, int* place);
void hollow_touch(int place, uint32_t when, const void* at, uint64_t nbytes, int writes, const char* name);
void hollow_race_copy(void* to, const void* from, uint64_t nbytes, void* stream, const char* name);
void hollow_race_unmap(const void* at, uint64_t nbytes);
void hollow_host_waits_for_stream(void* stream);
void hollow_host_waits_for_device(void);
void hollow_host_waits_for(const struct hollow_clock* clock);
int hollow_host_has_waited_for(const struct hollow_clock* clock);
void hollow_stream_waits_for(void* stream, const struct hollow_clock* clock);
void hollow_record(struct hollow_clock* clock, void* stream);

/* cudnn.c */
extern __thread int64_t hollow_workspace;   /* what the next convolution is to want, in bytes; -1: HOLLOW_WORKSPACE */

/* streams.c */
int hollow_captures(void* stream);
void hollow_capture(void* stream, void (*run)(void* data, void* stream), void (*drop)(void* data), void* data);

#endif

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
int hollow_computes(void);                  /* whether memory has values (HOLLOW_COMPUTE) */
int hollow_on_device(const void *at);
cudaError_t hollow_failed(cudaError_t error);

/* races.c */
#define HOLLOW_STREAMS 32
struct hollow_clock { uint32_t of[HOLLOW_STREAMS]; };
int hollow_checks_races(void);
uint32_t hollow_begin(void *stream, int *place);
void hollow_touch(int place, uint32_t when, const void *at, uint64_t nbytes, int writes, const char *name);
void hollow_race_copy(void *to, const void *from, uint64_t nbytes, void *stream, const char *name);
void hollow_race_unmap(const void *at, uint64_t nbytes);
void hollow_host_waits_for_stream(void *stream);
void hollow_host_waits_for_device(void);
void hollow_host_waits_for(const struct hollow_clock *clock);
int hollow_host_has_waited_for(const struct hollow_clock *clock);
void hollow_stream_waits_for(void *stream, const struct hollow_clock *clock);
void hollow_record(struct hollow_clock *clock, void *stream);

/* streams.c */
int hollow_captures(void *stream);
void hollow_capture(void *stream, void (*run)(void *data, void *stream), void (*drop)(void *data), void *data);

#endif

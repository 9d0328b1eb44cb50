/* Time on the hollow GPU (--clock): when the host asks for work, and when a GPU would have done it.

   The host's clock is what CLOCK_MONOTONIC shows to this process. It runs while the process has a processor, HOLLOW_HOST
   times as fast as this machine does, and is put forward by calls that take the driver's time and by waiting for the GPU.
   So it is that of a machine of its own, whatever else runs on this one. All threads share it: where several compute at
   the same time, it shows the sum.

   Each stream has the time at which it will have done all that was asked of it. timed.cpp says what operators take. The
   driver's calls take what they took on an H200 (`python -m tests.bench.gpu_short`). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "hollow.h"

#define QUEUE 1024 /* so many launches may be under way before the host has to wait */
#define STREAMS 64

struct stream { void *at; int device; int64_t done, busy; uint32_t launches; int64_t under_way[QUEUE]; };
static struct stream *streams[STREAMS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double host_scale, pace = 1;
static int64_t began, put_forward, reading_takes, readings, cpu_began;
static int (*really)(clockid_t, struct timespec *);

static int64_t read_really(clockid_t clock) {
    struct timespec now;
    really(clock, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static int64_t latest;
static int on = -1;

static void begin_again(void) { /* in a forked child, whose processor time begins at 0 */
    began = latest;
    put_forward = readings = cpu_began = 0;
}

static void begin(void) {
    const char *named = getenv("HOLLOW_CLOCK"), *scale = getenv("HOLLOW_HOST");
    really = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    host_scale = scale && *scale ? atof(scale) : HOLLOW_HOST;
    int64_t first = read_really(CLOCK_PROCESS_CPUTIME_ID);
    for (int i = 0; i < 256; i++) cpu_began = read_really(CLOCK_PROCESS_CPUTIME_ID);
    reading_takes = (cpu_began - first) / 256;
    began = read_really(CLOCK_MONOTONIC);
    on = named && *named;
    if (on) pthread_atfork(NULL, NULL, begin_again);
}

int hollow_keeps_time(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (on < 0) pthread_once(&once, begin);
    return on;
}

/* -- the host's clock ---------------------------------------------------------------------------- */

/* What else runs on this machine slows down what runs here. So a piece of work that is always the same is timed every few
   milliseconds. Where it takes twice as long, steps take some 1.4 times as long. */
#define PIECE_NS 165000 /* what it takes if nothing else runs */
#define EVERY_NS 4000000
static int64_t piece(void) {
    static uint32_t table[1 << 14];
    static volatile uint32_t found;
    int64_t start = read_really(CLOCK_PROCESS_CPUTIME_ID);
    uint32_t at = found | 1;
    for (int i = 0; i < 50000; i++) {
        uint32_t *one = table + (at >> 18);
        at = at * 1664525u + 1013904223u + *one;
        if (at & 64) *one ^= at; else *one += (uint32_t)i;
    }
    found = at;
    return read_really(CLOCK_PROCESS_CPUTIME_ID) - start;
}

static int64_t now(void) { /* with the lock */
    int64_t read = read_really(CLOCK_PROCESS_CPUTIME_ID), ran = read - cpu_began - reading_takes * ++readings;
    int64_t found = began + put_forward + (int64_t)(host_scale * pace * (double)ran);
    if (ran > EVERY_NS) {
        put_forward = found - began;
        int64_t took = piece();
        pace += (sqrt(PIECE_NS / (double)took) - pace) / 4;
        cpu_began = read_really(CLOCK_PROCESS_CPUTIME_ID);
        readings = 0;
    }
    return latest = found > latest ? found : latest;
}

static void wait_until(int64_t when) { /* with the lock */
    int64_t behind = when - now();
    if (behind > 0) put_forward += behind;
}

/* A call of the driver's takes the host so long. */
void hollow_spend(int64_t ns) {
    if (!hollow_keeps_time()) return;
    pthread_mutex_lock(&lock);
    put_forward += ns;
    pthread_mutex_unlock(&lock);
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    if (!hollow_keeps_time() || clock != CLOCK_MONOTONIC) return really(clock, found);
    pthread_mutex_lock(&lock);
    int64_t ns = now();
    pthread_mutex_unlock(&lock);
    *found = (struct timespec){ns / 1000000000ll, ns % 1000000000ll};
    return 0;
}

/* Nobody waits for a processor on this clock, so the system must not tell how long one has (own_time.py). */
int open64(const char *path, int flags, ...) {
    static int (*open_really)(const char *, int, ...);
    if (!open_really) *(void **)&open_really = dlsym(RTLD_NEXT, "open64");
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
    va_end(more);
    if (hollow_keeps_time() && strstr(path, "/schedstat")) { errno = ENOENT; return -1; }
    return open_really(path, flags, mode);
}

/* Sleeping puts the clock forward. */
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *asked, struct timespec *left) {
    static int (*sleep_really)(clockid_t, int, const struct timespec *, struct timespec *);
    if (!sleep_really) *(void **)&sleep_really = dlsym(RTLD_NEXT, "clock_nanosleep");
    if (!hollow_keeps_time() || clock != CLOCK_MONOTONIC) return sleep_really(clock, flags, asked, left);
    int64_t ns = asked->tv_sec * 1000000000ll + asked->tv_nsec;
    pthread_mutex_lock(&lock);
    wait_until(flags ? ns : now() + ns);
    pthread_mutex_unlock(&lock);
    struct timespec moment = {0, 100000}; /* for others to run */
    return sleep_really(CLOCK_REALTIME, 0, &moment, NULL);
}

/* Waiting for another thread, for some time, ends after so much of the system's. */
static struct timespec of_the_system(const struct timespec *ends) {
    pthread_mutex_lock(&lock);
    int64_t left = ends->tv_sec * 1000000000ll + ends->tv_nsec - now();
    pthread_mutex_unlock(&lock);
    int64_t ns = read_really(CLOCK_MONOTONIC) + (left > 0 ? left : 0);
    return (struct timespec){ns / 1000000000ll, ns % 1000000000ll};
}

int pthread_cond_timedwait(pthread_cond_t *one, pthread_mutex_t *mutex, const struct timespec *ends) {
    static int (*wait_really)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!wait_really) *(void **)&wait_really = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!hollow_keeps_time() || ends->tv_sec > 1000000000) return wait_really(one, mutex, ends); /* by the date */
    struct timespec real = of_the_system(ends);
    return wait_really(one, mutex, &real);
}
int pthread_cond_clockwait(pthread_cond_t *one, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *ends) {
    static int (*wait_really)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!wait_really) *(void **)&wait_really = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    if (!hollow_keeps_time() || clock != CLOCK_MONOTONIC) return wait_really(one, mutex, clock, ends);
    struct timespec real = of_the_system(ends);
    return wait_really(one, mutex, clock, &real);
}
int sem_clockwait(sem_t *one, clockid_t clock, const struct timespec *ends) {
    static int (*wait_really)(sem_t *, clockid_t, const struct timespec *);
    if (!wait_really) *(void **)&wait_really = dlsym(RTLD_NEXT, "sem_clockwait");
    if (!hollow_keeps_time() || clock != CLOCK_MONOTONIC) return wait_really(one, clock, ends);
    struct timespec real = of_the_system(ends);
    return wait_really(one, clock, &real);
}

/* -- the GPU's ----------------------------------------------------------------------------------- */

static struct stream *of(void *at) { /* with the lock */
    int i = 0;
    for (; i < STREAMS && streams[i]; i++)
        if (streams[i]->at == at && (at || streams[i]->device == hollow_current)) return streams[i];
    if (i == STREAMS) abort();
    streams[i] = calloc(1, sizeof **streams);
    streams[i]->at = at;
    streams[i]->device = hollow_current;
    return streams[i];
}

/* Work that takes the GPU so long. */
void hollow_launch(void *at, int64_t ns) {
    if (!hollow_keeps_time()) return;
    pthread_mutex_lock(&lock);
    struct stream *one = of(at);
    int64_t *place = &one->under_way[one->launches++ % QUEUE];
    put_forward += HOLLOW_LAUNCH_NS;
    wait_until(*place);
    int64_t ready = now();
    if (one->done < ready) one->done = ready;
    one->done += ns + HOLLOW_GAP_NS;
    one->busy += ns;
    *place = one->done;
    pthread_mutex_unlock(&lock);
}

/* When all that was asked of the stream so far will be done. */
int64_t hollow_done(void *at) {
    if (!hollow_keeps_time()) return read_really(CLOCK_MONOTONIC);
    pthread_mutex_lock(&lock);
    int64_t ready = now(), done = of(at)->done;
    pthread_mutex_unlock(&lock);
    return done > ready ? done : ready;
}

void hollow_wait_until(int64_t when) {
    pthread_mutex_lock(&lock);
    wait_until(when);
    pthread_mutex_unlock(&lock);
}

int hollow_is_over(int64_t when) {
    pthread_mutex_lock(&lock);
    int over = when <= now();
    pthread_mutex_unlock(&lock);
    return over;
}

void hollow_stream_waits_until(void *at, int64_t when) {
    pthread_mutex_lock(&lock);
    struct stream *one = of(at);
    if (one->done < when) one->done = when;
    pthread_mutex_unlock(&lock);
}

void hollow_wait_for_device(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < STREAMS && streams[i]; i++)
        if (streams[i]->device == hollow_current) wait_until(streams[i]->done);
    pthread_mutex_unlock(&lock);
}

/* For tests, by ctypes: how long the device's streams have been busy, in ns. */
int64_t hollow_busy_ns(int device) {
    int64_t sum = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < STREAMS && streams[i]; i++)
        if (streams[i]->device == device) sum += streams[i]->busy;
    pthread_mutex_unlock(&lock);
    return sum;
}

/* Who has touched which memory, and whether he had waited for those before him (HOLLOW_RACES=1).

   Work on one stream is ordered. Between streams, and between a stream and the host, only what was waited for is. Each
   stream has a clock of all streams' work that comes before what it does next, and so has the host (all its threads
   together). For each 512 bytes, the last write and each stream's last read are known. Kernels run at once here, so
   values are right even where the program forgot to wait: the clocks say so.

   HOLLOW_RACES=2: work is done only once it is waited for, so an event that is asked is never found done before. */
#include <stdio.h>
#include <string.h>

#include "hollow.h"

#define GRAIN 512ull

struct grain { uint32_t written, reads[HOLLOW_STREAMS]; uint8_t writer; };
static struct { void *stream; int device; struct hollow_clock at; } streams[HOLLOW_STREAMS];
static int stream_count;
static struct hollow_clock host;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int found; /* races so far */

int hollow_checks_races(void) {
    static int known = -1;
    if (known < 0) known = (int)hollow_number("HOLLOW_RACES", 0);
    return known;
}

/* For tests, by ctypes: how many since the last call. */
int hollow_races(void) {
    int since = found;
    found = 0;
    return since;
}

static void later(struct hollow_clock *one, const struct hollow_clock *other) {
    for (int i = 0; i < HOLLOW_STREAMS; i++)
        if (other->of[i] > one->of[i]) one->of[i] = other->of[i];
}

static int place_of(void *stream) {
    for (int i = 0; i < stream_count; i++)
        if (streams[i].stream == stream && (stream || streams[i].device == hollow_current)) return i;
    if (stream_count == HOLLOW_STREAMS) { fprintf(stderr, "hollow: too many streams\n"); abort(); }
    streams[stream_count].stream = stream;
    streams[stream_count].device = hollow_current;
    return stream_count++;
}

/* The shadow of memory, by address: a table of stretches of 16 MiB. */
#define STRETCHES 8192
#define STRETCH (1ull << 24)
static struct { uint64_t base; struct grain *grains; } shadow[STRETCHES];

static struct grain *shadow_of(uint64_t at) {
    uint64_t base = at / STRETCH;
    size_t place = (base * 0x9E3779B97F4A7C15ull) >> 51;
    while (shadow[place].grains && shadow[place].base != base) place = (place + 1) % STRETCHES;
    if (!shadow[place].grains) {
        shadow[place].base = base;
        shadow[place].grains = mmap(NULL, (STRETCH / GRAIN) * sizeof(struct grain), PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (shadow[place].grains == MAP_FAILED) abort();
    }
    return shadow[place].grains + at % STRETCH / GRAIN;
}

static void tell(const char *name, const char *what, int mine, int theirs, uint64_t at) {
    char text[512];
    snprintf(text, sizeof text, "%s, on stream %d of device %d, %s stream %d of device %d has not been waited for (%#lx)", name,
             mine, mine < 0 ? 0 : streams[mine].device, what, theirs, streams[theirs].device, (unsigned long)at);
    if (++found > 40) return;
    fprintf(stderr, "RACE: %s\n", text);
    const char *path = getenv("HOLLOW_RACES_FOUND");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%s\n", text);
    fclose(file);
}

/* Work begins on a stream, after all that the host has waited for. Returns its number on that stream. */
uint32_t hollow_begin(void *stream, int *place) {
    pthread_mutex_lock(&lock);
    int mine = *place = place_of(stream);
    later(&streams[mine].at, &host);
    uint32_t when = ++streams[mine].at.of[mine];
    pthread_mutex_unlock(&lock);
    return when;
}

void hollow_touch(int mine, uint32_t when, const void *at, uint64_t nbytes, int writes, const char *name) {
    pthread_mutex_lock(&lock);
    struct hollow_clock *now = &streams[mine].at;
    int told = 0;
    for (uint64_t one = (uint64_t)at / GRAIN * GRAIN; one < (uint64_t)at + nbytes; one += GRAIN) {
        struct grain *grain = shadow_of(one);
        if (grain->written > now->of[grain->writer] && !told++)
            tell(name, writes ? "writes what a write on" : "reads what a write on", mine, grain->writer, one);
        if (!writes) {
            grain->reads[mine] = when;
            continue;
        }
        for (int i = 0; i < stream_count; i++)
            if (grain->reads[i] > now->of[i] && !told++) tell(name, "writes what a read on", mine, i, one);
        grain->written = when;
        grain->writer = (uint8_t)mine;
    }
    pthread_mutex_unlock(&lock);
}

void hollow_race_copy(void *to, const void *from, uint64_t nbytes, void *stream, const char *name) {
    if (!hollow_checks_races() || !nbytes) return;
    int place;
    uint32_t when = hollow_begin(stream, &place);
    if (hollow_on_device(from)) hollow_touch(place, when, from, nbytes, 0, name);
    if (hollow_on_device(to)) hollow_touch(place, when, to, nbytes, 1, name);
}

/* The driver takes memory away, so the host must have waited for all that uses it. */
void hollow_race_unmap(const void *at, uint64_t nbytes) {
    if (!hollow_checks_races()) return;
    pthread_mutex_lock(&lock);
    int told = 0;
    for (uint64_t one = (uint64_t)at; one < (uint64_t)at + nbytes; one += GRAIN) {
        struct grain *grain = shadow_of(one);
        if (grain->written > host.of[grain->writer] && !told++)
            tell("unmapping", "takes away what a write on", -1, grain->writer, one);
        for (int i = 0; i < stream_count; i++)
            if (grain->reads[i] > host.of[i] && !told++) tell("unmapping", "takes away what a read on", -1, i, one);
        memset(grain, 0, sizeof *grain);
    }
    pthread_mutex_unlock(&lock);
}

void hollow_host_waits_for(const struct hollow_clock *clock) {
    pthread_mutex_lock(&lock);
    later(&host, clock);
    pthread_mutex_unlock(&lock);
}

int hollow_host_has_waited_for(const struct hollow_clock *clock) {
    pthread_mutex_lock(&lock);
    int all = 1;
    for (int i = 0; i < HOLLOW_STREAMS; i++) all &= clock->of[i] <= host.of[i];
    pthread_mutex_unlock(&lock);
    return all;
}

void hollow_host_waits_for_stream(void *stream) {
    pthread_mutex_lock(&lock);
    later(&host, &streams[place_of(stream)].at);
    /* Before it unmaps, PyTorch waits for a device's default stream while another device may be the current one. */
    for (int i = 0; i < stream_count && !stream; i++)
        if (!streams[i].stream) later(&host, &streams[i].at);
    pthread_mutex_unlock(&lock);
}

void hollow_host_waits_for_device(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < stream_count; i++)
        if (streams[i].device == hollow_current) later(&host, &streams[i].at);
    pthread_mutex_unlock(&lock);
}

void hollow_stream_waits_for(void *stream, const struct hollow_clock *clock) {
    pthread_mutex_lock(&lock);
    later(&streams[place_of(stream)].at, clock);
    pthread_mutex_unlock(&lock);
}

void hollow_record(struct hollow_clock *clock, void *stream) {
    pthread_mutex_lock(&lock);
    *clock = streams[place_of(stream)].at;
    later(clock, &host);
    pthread_mutex_unlock(&lock);
}

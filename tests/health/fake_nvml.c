/* A stand-in for libnvidia-ml.so.1: the machine is what FAKE_NVML says.
 *
 * FAKE_NVML is a list of words: one board each, "b" or "bN" for a board in MIG mode with N instances, and at most one trouble:
 * "init=CODE" (nvmlInit fails), "board=CODE" (asking for the last board fails), "hang" (never returns), "crash".
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SHOW __attribute__((visibility("default")))
enum { BOARDS = 16 };
static int boards, mig[BOARDS], init_code, board_code;

struct pci { char old_id[16]; unsigned domain, bus, device, device_id, subsystem; char id[32]; };

SHOW int nvmlInitWithFlags(unsigned flags)
{
    char *words = strdup(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "");
    (void)flags;
    for (char *word = strtok(words, " "); word; word = strtok(NULL, " ")) {
        if (!strcmp(word, "hang")) { signal(SIGTERM, SIG_IGN); for (;;) pause(); }
        if (!strcmp(word, "crash")) abort();
        if (sscanf(word, "init=%d", &init_code) == 1 || sscanf(word, "board=%d", &board_code) == 1) continue;
        mig[boards++] = word[1] ? atoi(word + 1) : -1;
    }
    return init_code;
}
SHOW int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
SHOW const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : code == 15 ? "GPU is lost" : "Other"; }
SHOW int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)boards; return 0; }

/* Handles: board * 100 + instance + 1, where instance 0 is the board itself. */
static long board_of(void *handle) { return ((long)handle - 1) / 100; }
static long part_of(void *handle) { return ((long)handle - 1) % 100; }

SHOW int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    *handle = (void *)(long)(index * 100 + 1);
    return (int)index == boards - 1 ? board_code : 0;
}
SHOW int nvmlDeviceGetUUID(void *handle, char *text, unsigned size)
{
    if (part_of(handle)) snprintf(text, size, "MIG-%ld%ld00-cafe", board_of(handle), part_of(handle));
    else snprintf(text, size, "GPU-%ld000-cafe", board_of(handle));
    return 0;
}
SHOW int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *to)
{
    memset(to, 0, sizeof *to);
    snprintf(to->id, sizeof to->id, "00000000:%02lX:00.0", 0x3a + board_of(handle));
    return 0;
}
SHOW int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *next)
{
    *now = *next = mig[board_of(handle)] >= 0;
    return mig[board_of(handle)] < 0 && board_of(handle) ? 3 : 0; /* a plain board is able to but off if the first, else unable */
}
SHOW int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { (void)handle; *count = 7; return 0; }
SHOW int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **to)
{
    *to = (void *)((long)handle + (long)index + 1);
    return (int)index < mig[board_of(handle)] ? 0 : 6; /* not found */
}
SHOW int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *to) { *to = (unsigned)part_of(handle) + 6; return 0; }
SHOW int nvmlDeviceGetComputeInstanceId(void *handle, unsigned *to) { (void)handle; *to = 0; return 0; }

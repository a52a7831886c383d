// Shared state of the two fake libraries: a count of calls, and which of them fails.

#include <stddef.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

// The call that fails: the `fails_at`-th from now on of the functions whose name is `fails_in`, of all if it is
// empty. 0: none.
static char fails_in[64];
static long fails_at, calls;
static int fails_with;
// The function that failed last.
static char failed[64];

static void set_failure(const char *function, long nth, int code) {
    strncpy(fails_in, function, sizeof fails_in - 1);
    fails_at = nth;
    fails_with = code;
    calls = 0;
    failed[0] = 0;
}

// Result of a call before it has done anything.
static int entered(const char *function) {
    if (fails_in[0] && strcmp(fails_in, function)) return 0;
    if (__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) != fails_at) return 0;  // kernels are compiled side by side
    strncpy(failed, function, sizeof failed - 1);
    return fails_with;
}

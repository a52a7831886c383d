// A compiler (NVRTC) for tests: it returns a few bytes as machine code, and fails on demand.

#include "control.h"

typedef int Result;

static int major = 13, minor = 0, size = 64;
static const char *text = "a message of the compiler";

EXPORT void fake_nvrtc_set(const char *name, long value) {
    if (!strcmp(name, "major")) major = value;
    if (!strcmp(name, "size")) size = value;
}
EXPORT void fake_nvrtc_fail(const char *function, long nth, int code) { set_failure(function, nth, code); }
EXPORT long fake_nvrtc_calls(void) { return calls; }
EXPORT const char *fake_nvrtc_failed(void) { return failed; }

#define ENTER                                     \
    do {                                          \
        int code = entered(__func__);             \
        if (code) return code;                    \
    } while (0)

EXPORT Result nvrtcVersion(int *a, int *b) { ENTER; *a = major; *b = minor; return 0; }
EXPORT Result nvrtcCreateProgram(
    void **to, const char *source, const char *name, int headers, const char *const *a, const char *const *b
) {
    ENTER;
    (void)source, (void)name, (void)headers, (void)a, (void)b;
    *to = &major;
    return 0;
}
EXPORT Result nvrtcDestroyProgram(void **program) { ENTER; *program = NULL; return 0; }
EXPORT Result nvrtcCompileProgram(void *program, int count, const char *const *options) {
    ENTER;
    (void)program, (void)count, (void)options;
    return 0;
}
EXPORT Result nvrtcGetProgramLogSize(void *program, size_t *to) {
    ENTER;
    (void)program;
    *to = strlen(text) + 1;
    return 0;
}
EXPORT Result nvrtcGetProgramLog(void *program, char *to) { ENTER; (void)program; strcpy(to, text); return 0; }
EXPORT Result nvrtcGetCUBINSize(void *program, size_t *to) { ENTER; (void)program; *to = size; return 0; }
EXPORT Result nvrtcGetCUBIN(void *program, char *to) {
    ENTER;
    (void)program;
    memset(to, 0, size);
    if (size >= 4) memcpy(to, "\x7f" "ELF", 4);
    return 0;
}

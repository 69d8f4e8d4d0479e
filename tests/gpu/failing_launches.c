// Preloaded by tests of what is said when a launch fails: makes one launch of the project's own libraries fail, with a
// CUDA error of choice, in the driver's place. Everything else goes to the driver.
//
//   cc -shared -fPIC -O2 -o failing_launches.so failing_launches.c -ldl
//
// The CUDA runtime that is linked into the libraries asks dlsym for cuGetProcAddress, and that for all other calls.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

enum { PER_THREAD_STREAM = 2 };

typedef int (*LaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                            void**);
typedef int (*LaunchKernelEx)(void const*, void*, void**, void**);
typedef int (*GetProcAddress)(char const*, void**, int, unsigned long long, void*);

static LaunchKernel launch_kernel;
static LaunchKernelEx launch_kernel_ex;
static GetProcAddress get_proc_address;
static long countdown = -1, counted;
static int status;

// The launch `after` so many more of the project's fails, once; -1: none does. Counting begins anew.
void fail_launch(long after, int with) { countdown = after, status = with, counted = 0; }

long launches(void) { return counted; }

static int fails(void const* caller) {
    Dl_info from;
    if (!dladdr(caller, &from) || !from.dli_fname || !strstr(from.dli_fname, "libnextn_")) return 0;
    ++counted;
    return countdown >= 0 && countdown-- == 0;
}

static int my_launch_kernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned smem, void* stream, void** params, void** extra) {
    if (fails(__builtin_return_address(0))) return status;
    return launch_kernel(f, gx, gy, gz, bx, by, bz, smem, stream, params, extra);
}

static int my_launch_kernel_ex(void const* config, void* f, void** params, void** extra) {
    if (fails(__builtin_return_address(0))) return status;
    return launch_kernel_ex(config, f, params, extra);
}

static int my_get_proc_address(char const* symbol, void** found, int version, unsigned long long flags, void* how) {
    int const result = get_proc_address(symbol, found, version, flags, how);
    if (result || !*found || flags & PER_THREAD_STREAM) return result;
    if (!*symbol || (!strcmp(symbol, "cuGetProcAddress") && version >= 12000)) {  // "": the function itself
        get_proc_address = (GetProcAddress)*found;
        *found = (void*)my_get_proc_address;
    } else if (!strcmp(symbol, "cuLaunchKernel")) {
        launch_kernel = (LaunchKernel)*found;
        *found = (void*)my_launch_kernel;
    } else if (!strcmp(symbol, "cuLaunchKernelEx")) {
        launch_kernel_ex = (LaunchKernelEx)*found;
        *found = (void*)my_launch_kernel_ex;
    }
    return 0;
}

void* dlsym(void* handle, char const* name) {
    static void* (*real)(void*, char const*);
    if (!real) real = (void* (*)(void*, char const*))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (strcmp(name, "cuGetProcAddress_v2")) return real(handle, name);
    get_proc_address = (GetProcAddress)real(handle, name);
    return get_proc_address ? (void*)my_get_proc_address : 0;
}

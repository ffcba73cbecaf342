/*
 * How much of the machine's memory a process could still take before the kernel kills somebody:
 * what it calls available and what of swap is free, or less where a control group of it, or one
 * above that, has a limit. Of a limit's use only memory counts that the kernel cannot drop
 * (anonymous, shared); its page cache gives way. Sources: proc(5),
 * Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux. Any thread; reads
 * files that the kernel makes up, which never wait, and allocates nothing.
 */
#ifndef MOBULA_BASE_MEMORY_H
#define MOBULA_BASE_MEMORY_H

#include <stdint.h>

/* Bytes; UINT64_MAX: the kernel does not say. root: "" or, in tests, a folder that stands for it.
 */
uint64_t mb_memory_available(const char *root);

/* What this process has in memory; 0: the kernel does not say. */
uint64_t mb_memory_resident(void);

#endif

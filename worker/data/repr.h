/* Numbers as Python prints them. Pure; any thread. */
#ifndef MOBULA_WORKER_DATA_REPR_H
#define MOBULA_WORKER_DATA_REPR_H

enum { MB_REPR_DOUBLE_MAX = 32 };

/* repr() of a Python float into out[MB_REPR_DOUBLE_MAX]; returns out. */
char *mb_repr_double(double v, char *out);

#endif

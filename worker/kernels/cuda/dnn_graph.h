/*
 * Graphs of cuDNN's operations: tensors and operations are added one by one, then an engine is
 * found for the whole. The first failure is kept, what follows does nothing. The numbers are those
 * of cudnn_graph.h; they are part of the ABI of version 9.
 */
#ifndef MOBULA_WORKER_KERNELS_CUDA_DNN_GRAPH_H
#define MOBULA_WORKER_KERNELS_CUDA_DNN_GRAPH_H

#include <stddef.h>
#include <stdint.h>

enum dnn_data_type {
    DNN_FLOAT = 0,
    DNN_HALF = 2,
    DNN_INT32 = 4,
    DNN_BF16 = 9,
    DNN_BOOLEAN = 11,
};

enum dnn_pointwise {
    DNN_ADD = 0,
    DNN_MUL = 1,
    DNN_DIV = 6,
    DNN_SUB = 9,
    DNN_EXP = 13,
    DNN_LOG = 15,
    DNN_IDENTITY = 21,
    DNN_CMP_GE = 303,
    DNN_GEN_INDEX = 501,
    DNN_BINARY_SELECT = 601,
};

enum dnn_reduction { DNN_REDUCE_ADD = 0, DNN_REDUCE_MAX = 3 };

typedef void *dnn_descriptor;

struct dnn_api {
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*set_stream)(void *handle, void *stream);
    size_t (*version)(void);
    int (*create_descriptor)(int type, dnn_descriptor *out);
    int (*destroy_descriptor)(dnn_descriptor d);
    int (*finalize)(dnn_descriptor d);
    int (*set_attribute)(dnn_descriptor d, int name, int type, int64_t n, const void *elements);
    int (*get_attribute)(dnn_descriptor d, int name, int type, int64_t wanted, int64_t *n,
                         void *elements);
    int (*execute)(void *handle, dnn_descriptor plan, dnn_descriptor pack);
};

enum { DNN_MAX_DESCRIPTORS = 160, DNN_MAX_OPERATIONS = 32, DNN_MAX_CONFIGS = 16 };

struct dnn_graph {
    const struct dnn_api *api;
    void *handle;
    dnn_descriptor owned[DNN_MAX_DESCRIPTORS], operations[DNN_MAX_OPERATIONS];
    size_t n_owned, n_operations;
    int64_t next_id; /* of tensors nobody names */
    int status;      /* of the first failure; 0 is success */
};

/* Sizes and strides in elements. */
struct dnn_layout {
    int64_t size[4], stride[4];
};

/* A tensor inside the graph. */
dnn_descriptor dnn_inner(struct dnn_graph *g, enum dnn_data_type type,
                         const struct dnn_layout *layout);
/* One whose memory is given at each run, by its id > 0. */
dnn_descriptor dnn_outer(struct dnn_graph *g, int64_t id, enum dnn_data_type type,
                         const struct dnn_layout *layout);
/* A float of the host that is given at each run, by its id > 0. */
dnn_descriptor dnn_scalar(struct dnn_graph *g, int64_t id);

/* b, select: NULL where the mode has none; axis only for DNN_GEN_INDEX. */
void dnn_pointwise(struct dnn_graph *g, enum dnn_pointwise mode, enum dnn_data_type precision,
                   dnn_descriptor x, dnn_descriptor b, dnn_descriptor select, dnn_descriptor y);
void dnn_index(struct dnn_graph *g, int64_t axis, dnn_descriptor x, dnn_descriptor y);
void dnn_reduce(struct dnn_graph *g, enum dnn_reduction mode, dnn_descriptor x, dnn_descriptor y);
void dnn_matmul(struct dnn_graph *g, dnn_descriptor a, dnn_descriptor b, dnn_descriptor c);
void dnn_reshape(struct dnn_graph *g, dnn_descriptor x, dnn_descriptor y);

/* The plan, owned by the graph as all descriptors are, and the workspace that it needs. NULL: no
 * engine takes the graph, or it has failed before. */
dnn_descriptor dnn_plan(struct dnn_graph *g, int64_t *workspace_bytes);
/* 0, or cuDNN's status. */
int dnn_run(const struct dnn_graph *g, dnn_descriptor plan, const int64_t *ids,
            void *const *pointers, int64_t n, void *workspace);
void dnn_graph_end(struct dnn_graph *g);

#endif

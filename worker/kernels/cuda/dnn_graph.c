/*
 * Descriptors of cuDNN's graph API.
 *  1. Every descriptor that is made is owned by the graph, so a failure needs no undoing of its
 * own.
 *  2. plan: the heuristic's engines in its order, the first that can be finalized.
 *  3. run: a variant pack, which names memory, is made for each run; it costs microseconds.
 */
#include "worker/kernels/cuda/dnn_graph.h"

enum descriptor_type {
    POINTWISE = 0,
    ENGINECFG = 3,
    ENGINEHEUR = 4,
    EXECUTION_PLAN = 5,
    OPERATION_POINTWISE = 13,
    OPERATIONGRAPH = 15,
    VARIANT_PACK = 16,
    TENSOR = 17,
    MATMUL = 18,
    OPERATION_MATMUL = 19,
    REDUCTION = 21,
    OPERATION_REDUCTION = 22,
    OPERATION_RESHAPE = 31,
};

enum attribute_type {
    HANDLE = 0,
    DATA_TYPE = 1,
    BOOLEAN = 2,
    INT64 = 3,
    VOID_PTR = 6,
    HEUR_MODE = 8,
    POINTWISE_MODE = 14,
    BACKEND_DESCRIPTOR = 15,
    REDUCTION_OPERATOR = 18,
};

enum attribute {
    A_POINTWISE_MODE = 0,
    A_POINTWISE_MATH_PREC = 1,
    A_POINTWISE_AXIS = 9,
    A_ENGINEHEUR_MODE = 200,
    A_ENGINEHEUR_OPERATION_GRAPH = 201,
    A_ENGINEHEUR_RESULTS = 202,
    A_PLAN_HANDLE = 400,
    A_PLAN_ENGINE_CONFIG = 401,
    A_PLAN_WORKSPACE_SIZE = 402,
    A_OPERATION_POINTWISE_DESC = 750,
    A_OPERATION_POINTWISE_X = 751,
    A_OPERATION_POINTWISE_B = 752,
    A_OPERATION_POINTWISE_Y = 753,
    A_OPERATION_POINTWISE_T = 758,
    A_OPERATIONGRAPH_HANDLE = 800,
    A_OPERATIONGRAPH_OPS = 801,
    A_TENSOR_BYTE_ALIGNMENT = 900,
    A_TENSOR_DATA_TYPE = 901,
    A_TENSOR_DIMENSIONS = 902,
    A_TENSOR_STRIDES = 903,
    A_TENSOR_UNIQUE_ID = 906,
    A_TENSOR_IS_VIRTUAL = 907,
    A_TENSOR_IS_BY_VALUE = 908,
    A_PACK_UNIQUE_IDS = 1000,
    A_PACK_DATA_POINTERS = 1001,
    A_PACK_WORKSPACE = 1003,
    A_MATMUL_COMP_TYPE = 1500,
    A_OPERATION_MATMUL_A = 1520,
    A_OPERATION_MATMUL_B = 1521,
    A_OPERATION_MATMUL_C = 1522,
    A_OPERATION_MATMUL_DESC = 1523,
    A_REDUCTION_OPERATOR = 1600,
    A_REDUCTION_COMP_TYPE = 1601,
    A_OPERATION_REDUCTION_X = 1610,
    A_OPERATION_REDUCTION_Y = 1611,
    A_OPERATION_REDUCTION_DESC = 1612,
    A_OPERATION_RESHAPE_X = 2200,
    A_OPERATION_RESHAPE_Y = 2201,
};

enum { FULL = -1, HEURISTIC_A = 3, ALIGN_BYTES = 16, FIRST_INNER_ID = 1000 };

static void note(struct dnn_graph *g, int status)
{
    if (g->status == 0)
        g->status = status;
}

static dnn_descriptor make(struct dnn_graph *g, enum descriptor_type type)
{
    dnn_descriptor d = NULL;
    if (g->status == 0 && g->n_owned == DNN_MAX_DESCRIPTORS)
        note(g, FULL);
    if (g->status != 0)
        return NULL;
    note(g, g->api->create_descriptor(type, &d));
    if (g->status != 0)
        return NULL;
    g->owned[g->n_owned++] = d;
    return d;
}

static void set(struct dnn_graph *g, dnn_descriptor d, enum attribute name,
                enum attribute_type type, int64_t n, const void *elements)
{
    if (g->status == 0)
        note(g, g->api->set_attribute(d, name, type, n, elements));
}

static void set_descriptor(struct dnn_graph *g, dnn_descriptor d, enum attribute name,
                           dnn_descriptor value)
{
    set(g, d, name, BACKEND_DESCRIPTOR, 1, &value);
}

static void finish(struct dnn_graph *g, dnn_descriptor d)
{
    if (g->status == 0)
        note(g, g->api->finalize(d));
}

static void finish_operation(struct dnn_graph *g, dnn_descriptor d)
{
    finish(g, d);
    if (g->status == 0 && g->n_operations == DNN_MAX_OPERATIONS)
        note(g, FULL);
    if (g->status == 0)
        g->operations[g->n_operations++] = d;
}

/* ---- tensors ---- */

static dnn_descriptor tensor(struct dnn_graph *g, int64_t id, enum dnn_data_type type,
                             const struct dnn_layout *layout, int is_inner, int is_scalar)
{
    const int64_t alignment = ALIGN_BYTES;
    const int32_t data_type = type;
    const char yes = 1; /* a C++ bool */
    dnn_descriptor d = make(g, TENSOR);
    set(g, d, A_TENSOR_DATA_TYPE, DATA_TYPE, 1, &data_type);
    set(g, d, A_TENSOR_DIMENSIONS, INT64, 4, layout->size);
    set(g, d, A_TENSOR_STRIDES, INT64, 4, layout->stride);
    set(g, d, A_TENSOR_UNIQUE_ID, INT64, 1, &id);
    set(g, d, A_TENSOR_BYTE_ALIGNMENT, INT64, 1, &alignment);
    if (is_inner)
        set(g, d, A_TENSOR_IS_VIRTUAL, BOOLEAN, 1, &yes);
    if (is_scalar)
        set(g, d, A_TENSOR_IS_BY_VALUE, BOOLEAN, 1, &yes);
    finish(g, d);
    return d;
}

dnn_descriptor dnn_inner(struct dnn_graph *g, enum dnn_data_type type,
                         const struct dnn_layout *layout)
{
    return tensor(g, FIRST_INNER_ID + g->next_id++, type, layout, 1, 0);
}

dnn_descriptor dnn_outer(struct dnn_graph *g, int64_t id, enum dnn_data_type type,
                         const struct dnn_layout *layout)
{
    return tensor(g, id, type, layout, 0, 0);
}

dnn_descriptor dnn_scalar(struct dnn_graph *g, int64_t id)
{
    static const struct dnn_layout ONE = {{1, 1, 1, 1}, {1, 1, 1, 1}};
    return tensor(g, id, DNN_FLOAT, &ONE, 0, 1);
}

/* ---- operations ---- */

static void pointwise(struct dnn_graph *g, enum dnn_pointwise mode, enum dnn_data_type precision,
                      const int64_t *axis, dnn_descriptor x, dnn_descriptor b,
                      dnn_descriptor select, dnn_descriptor y)
{
    const int32_t m = mode, p = precision;
    dnn_descriptor what = make(g, POINTWISE);
    set(g, what, A_POINTWISE_MODE, POINTWISE_MODE, 1, &m);
    set(g, what, A_POINTWISE_MATH_PREC, DATA_TYPE, 1, &p);
    if (axis != NULL)
        set(g, what, A_POINTWISE_AXIS, INT64, 1, axis);
    finish(g, what);
    dnn_descriptor op = make(g, OPERATION_POINTWISE);
    set_descriptor(g, op, A_OPERATION_POINTWISE_DESC, what);
    set_descriptor(g, op, A_OPERATION_POINTWISE_X, x);
    if (b != NULL)
        set_descriptor(g, op, A_OPERATION_POINTWISE_B, b);
    if (select != NULL)
        set_descriptor(g, op, A_OPERATION_POINTWISE_T, select);
    set_descriptor(g, op, A_OPERATION_POINTWISE_Y, y);
    finish_operation(g, op);
}

void dnn_pointwise(struct dnn_graph *g, enum dnn_pointwise mode, enum dnn_data_type precision,
                   dnn_descriptor x, dnn_descriptor b, dnn_descriptor select, dnn_descriptor y)
{
    pointwise(g, mode, precision, NULL, x, b, select, y);
}

void dnn_index(struct dnn_graph *g, int64_t axis, dnn_descriptor x, dnn_descriptor y)
{
    pointwise(g, DNN_GEN_INDEX, DNN_FLOAT, &axis, x, NULL, NULL, y);
}

void dnn_reduce(struct dnn_graph *g, enum dnn_reduction mode, dnn_descriptor x, dnn_descriptor y)
{
    const int32_t m = mode, precision = DNN_FLOAT;
    dnn_descriptor what = make(g, REDUCTION);
    set(g, what, A_REDUCTION_OPERATOR, REDUCTION_OPERATOR, 1, &m);
    set(g, what, A_REDUCTION_COMP_TYPE, DATA_TYPE, 1, &precision);
    finish(g, what);
    dnn_descriptor op = make(g, OPERATION_REDUCTION);
    set_descriptor(g, op, A_OPERATION_REDUCTION_DESC, what);
    set_descriptor(g, op, A_OPERATION_REDUCTION_X, x);
    set_descriptor(g, op, A_OPERATION_REDUCTION_Y, y);
    finish_operation(g, op);
}

void dnn_matmul(struct dnn_graph *g, dnn_descriptor a, dnn_descriptor b, dnn_descriptor c)
{
    const int32_t precision = DNN_FLOAT;
    dnn_descriptor what = make(g, MATMUL);
    set(g, what, A_MATMUL_COMP_TYPE, DATA_TYPE, 1, &precision);
    finish(g, what);
    dnn_descriptor op = make(g, OPERATION_MATMUL);
    set_descriptor(g, op, A_OPERATION_MATMUL_DESC, what);
    set_descriptor(g, op, A_OPERATION_MATMUL_A, a);
    set_descriptor(g, op, A_OPERATION_MATMUL_B, b);
    set_descriptor(g, op, A_OPERATION_MATMUL_C, c);
    finish_operation(g, op);
}

void dnn_reshape(struct dnn_graph *g, dnn_descriptor x, dnn_descriptor y)
{
    dnn_descriptor op = make(g, OPERATION_RESHAPE);
    set_descriptor(g, op, A_OPERATION_RESHAPE_X, x);
    set_descriptor(g, op, A_OPERATION_RESHAPE_Y, y);
    finish_operation(g, op);
}

/* ---- plans ---- */

/* The heuristic's answers; each descriptor has to be made before it can be asked for. */
static int64_t ask(struct dnn_graph *g, dnn_descriptor graph, dnn_descriptor *configs)
{
    const int32_t mode = HEURISTIC_A;
    int64_t n = 0;
    dnn_descriptor heuristic = make(g, ENGINEHEUR);
    set_descriptor(g, heuristic, A_ENGINEHEUR_OPERATION_GRAPH, graph);
    set(g, heuristic, A_ENGINEHEUR_MODE, HEUR_MODE, 1, &mode);
    finish(g, heuristic);
    for (int i = 0; i < DNN_MAX_CONFIGS; i++)
        configs[i] = make(g, ENGINECFG);
    if (g->status == 0)
        note(g, g->api->get_attribute(heuristic, A_ENGINEHEUR_RESULTS, BACKEND_DESCRIPTOR,
                                      DNN_MAX_CONFIGS, &n, configs));
    return g->status == 0 ? n : 0;
}

dnn_descriptor dnn_plan(struct dnn_graph *g, int64_t *workspace_bytes)
{
    dnn_descriptor configs[DNN_MAX_CONFIGS], graph = make(g, OPERATIONGRAPH);
    set(g, graph, A_OPERATIONGRAPH_OPS, BACKEND_DESCRIPTOR, (int64_t)g->n_operations,
        g->operations);
    set(g, graph, A_OPERATIONGRAPH_HANDLE, HANDLE, 1, &g->handle);
    finish(g, graph);
    const int64_t n = ask(g, graph, configs);
    for (int64_t i = 0; i < n && g->status == 0; i++) {
        int64_t got = 0;
        dnn_descriptor plan = make(g, EXECUTION_PLAN);
        set_descriptor(g, plan, A_PLAN_ENGINE_CONFIG, configs[i]);
        set(g, plan, A_PLAN_HANDLE, HANDLE, 1, &g->handle);
        if (g->status == 0 && g->api->finalize(plan) == 0 &&
            g->api->get_attribute(plan, A_PLAN_WORKSPACE_SIZE, INT64, 1, &got, workspace_bytes) ==
                0)
            return plan;
    }
    return NULL;
}

int dnn_run(const struct dnn_graph *g, dnn_descriptor plan, const int64_t *ids,
            void *const *pointers, int64_t n, void *workspace)
{
    const struct dnn_api *api = g->api;
    dnn_descriptor pack = NULL;
    int status = api->create_descriptor(VARIANT_PACK, &pack);
    if (status != 0)
        return status;
    status = api->set_attribute(pack, A_PACK_UNIQUE_IDS, INT64, n, ids);
    if (status == 0)
        status = api->set_attribute(pack, A_PACK_DATA_POINTERS, VOID_PTR, n, pointers);
    if (status == 0)
        status = api->set_attribute(pack, A_PACK_WORKSPACE, VOID_PTR, 1, &workspace);
    if (status == 0)
        status = api->finalize(pack);
    if (status == 0)
        status = api->execute(g->handle, plan, pack);
    api->destroy_descriptor(pack);
    return status;
}

void dnn_graph_end(struct dnn_graph *g)
{
    while (g->n_owned > 0)
        g->api->destroy_descriptor(g->owned[--g->n_owned]);
}

/* cuDNN for the hollow GPU: convolutions by its graph API, with two engines to choose from, the first of which wants
   a workspace (HOLLOW_WORKSPACE bytes); batch norm; recurrent layers. What they compute is in operators.cpp. */
#include <cudnn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hollow.h"
#include "rnn.h"

#define ENGINES 2
#define WORKSPACE ((hollow_computes() ? 32ull : 128ull) << 20) /* for small programs, and for those of full size */

__thread int64_t hollow_workspace = -1;

struct descriptor { cudnnBackendDescriptorType_t type; int64_t engine; };

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
const char *cudnnGetErrorString(cudnnStatus_t status) { (void)status; return "CUDNN_STATUS_NOT_SUPPORTED"; }
void cudnnGetLastErrorString(char *text, size_t nbytes) { snprintf(text, nbytes, "hollow"); }

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *made) {
    struct descriptor *one = calloc(1, sizeof *one);
    one->type = type;
    *made = one;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t one) { free(one); return CUDNN_STATUS_SUCCESS; }

/* For compute.cpp: the engines that this thread has run since it asked last, a bit for each. */
static __thread int ran;
int hollow_engines(void) {
    int found = ran;
    ran = 0;
    return found;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
    (void)handle; (void)pack;
    ran |= 1 << ((struct descriptor *)plan)->engine;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t one) { (void)one; return CUDNN_STATUS_SUCCESS; }

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t one, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void *values) {
    (void)type; (void)count;
    if (name == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)
        ((struct descriptor *)one)->engine = (*(struct descriptor *const *)values)->engine;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const one, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t asked, int64_t *count, void *values) {
    const struct descriptor *self = one;
    int64_t unwanted;
    if (!count) count = &unwanted;
    *count = 0;
    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
        *count = values && asked < ENGINES ? asked : ENGINES;
        for (int64_t i = 0; values && i < asked && i < ENGINES; i++) ((struct descriptor **)values)[i]->engine = i;
    } else if (name == CUDNN_ATTR_ENGINECFG_ENGINE) {
        *count = 1;
        if (values && asked) (*(struct descriptor **)values)->engine = self->engine;
    } else if (type == CUDNN_TYPE_INT64 && values && asked) {
        *count = 1;
        *(int64_t *)values = name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && self->engine == 0
                                 ? hollow_workspace >= 0 ? hollow_workspace : (int64_t)hollow_number("HOLLOW_WORKSPACE", WORKSPACE)
                                 : 0;
    }
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t scale,
    const cudnnActivationDescriptor_t activation, size_t *found) {
    (void)handle; (void)mode; (void)ops; (void)x; (void)z; (void)y; (void)scale; (void)activation;
    *found = 1 << 16;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz,
    const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t scale, const cudnnActivationDescriptor_t activation,
    size_t *found) {
    (void)handle; (void)mode; (void)ops; (void)x; (void)y; (void)dy; (void)dz; (void)dx; (void)scale; (void)activation;
    *found = 1 << 16;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops,
    const cudnnActivationDescriptor_t activation, const cudnnTensorDescriptor_t x, size_t *found) {
    (void)handle; (void)mode; (void)ops; (void)activation; (void)x;
    *found = 1 << 12;
    return CUDNN_STATUS_SUCCESS;
}

/* -- recurrent layers ---------------------------------------------------------------------------- */

struct tensor { cudnnDataType_t type; int dims, size[8]; };
struct rnn { struct rnn_sizes sizes; cudnnDataType_t type; };

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t *made) { *made = calloc(1, sizeof(struct tensor)); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t one) { free(one); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t one, int asked, cudnnDataType_t *type, int *dims,
                                         int size[], int stride[]) {
    const struct tensor *self = (const struct tensor *)one;
    int next = 1;
    *type = self->type;
    *dims = self->dims;
    for (int i = 0; i < asked && i < self->dims; i++) size[i] = self->size[i];
    for (int i = self->dims - 1; i >= 0; i--) {
        if (i < asked) stride[i] = next;
        next *= self->size[i];
    }
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t *made) { *made = calloc(1, sizeof(struct rnn)); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t one) { free(one); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t one, cudnnRNNAlgo_t algorithm, cudnnRNNMode_t cell,
                                       cudnnRNNBiasMode_t bias, cudnnDirectionMode_t direction, cudnnRNNInputMode_t input,
                                       cudnnDataType_t type, cudnnDataType_t precision, cudnnMathType_t math, int32_t input_size,
                                       int32_t hidden_size, int32_t projected_size, int32_t layers,
                                       cudnnDropoutDescriptor_t dropout, uint32_t flags) {
    (void)algorithm; (void)bias; (void)input; (void)precision; (void)math; (void)dropout; (void)flags;
    int gates = cell == CUDNN_LSTM ? 4 : cell == CUDNN_GRU ? 3 : 1;
    int directions = direction == CUDNN_BIDIRECTIONAL ? 2 : 1;
    if (projected_size == hidden_size) projected_size = 0; /* cuDNN's way to say so */
    *(struct rnn *)one = (struct rnn){{gates, input_size, hidden_size, projected_size, layers, directions}, type};
    return CUDNN_STATUS_SUCCESS;
}

static size_t item(cudnnDataType_t type) {
    return type == CUDNN_DATA_DOUBLE ? 8 : type == CUDNN_DATA_FLOAT ? 4 : 2;
}

cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t handle, cudnnRNNDescriptor_t one, size_t *found) {
    const struct rnn *self = (const struct rnn *)one;
    (void)handle;
    *found = (size_t)rnn_end(&self->sizes) * item(self->type);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t handle, cudnnRNNDescriptor_t one, int32_t layer, size_t nbytes,
                                      const void *space, int32_t linear, cudnnTensorDescriptor_t matrix_desc, void **matrix,
                                      cudnnTensorDescriptor_t bias_desc, void **bias) {
    const struct rnn *self = (const struct rnn *)one;
    const struct rnn_sizes *sizes = &self->sizes;
    (void)handle; (void)nbytes;
    int half = linear / sizes->gates; /* of the input, of what recurs; 2: the projection */
    int gate = linear % sizes->gates, rows = sizes->hidden, columns = rnn_columns(sizes, layer, half);
    if (half == 2) { gate = 0; rows = sizes->projected; columns = sizes->hidden; }
    if (matrix) {
        *matrix = (char *)space + ((size_t)rnn_matrix(sizes, layer, half) + (size_t)gate * rows * columns) * item(self->type);
        *(struct tensor *)matrix_desc = (struct tensor){self->type, 3, {1, rows, columns}};
    }
    if (bias) {
        *bias = (char *)space + ((size_t)rnn_bias(sizes, layer, half) + (size_t)gate * rows) * item(self->type);
        *(struct tensor *)bias_desc = (struct tensor){self->type, 3, {1, rows, 1}};
    }
    return CUDNN_STATUS_SUCCESS;
}

struct rnn_data { int steps, batch; };
cudnnStatus_t cudnnCreateRNNDataDescriptor(cudnnRNNDataDescriptor_t *made) { *made = calloc(1, sizeof(struct rnn_data)); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnDestroyRNNDataDescriptor(cudnnRNNDataDescriptor_t one) { free(one); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t one, cudnnDataType_t type, cudnnRNNDataLayout_t layout, int steps,
                                        int batch, int vector, const int lengths[], void *padding) {
    (void)type; (void)layout; (void)vector; (void)lengths; (void)padding;
    *(struct rnn_data *)one = (struct rnn_data){steps, batch};
    return CUDNN_STATUS_SUCCESS;
}

/* The reserve space has what the backward pass needs of the forward one: gates and cells. The workspace is as large as on an
   H100, with cuDNN 9. */
cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t handle, cudnnRNNDescriptor_t one, cudnnForwardMode_t mode,
                                        cudnnRNNDataDescriptor_t data, size_t *workspace, size_t *reserve) {
    const struct rnn_sizes *sizes = &((const struct rnn *)one)->sizes;
    const struct rnn_data *shape = (const struct rnn_data *)data;
    (void)handle;
    size_t cells = (size_t)shape->steps * shape->batch * sizes->hidden * sizes->directions * item(((const struct rnn *)one)->type);
    *workspace = 6 * cells * sizes->gates;
    if (reserve) *reserve = mode == CUDNN_FWD_MODE_TRAINING ? HOLLOW_RESERVED + cells * sizes->layers * (sizes->gates + 1) : 0;
    return CUDNN_STATUS_SUCCESS;
}

/* The state of dropout is a seed and the number of calls. */
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t handle, size_t *found) { (void)handle; *found = 1 << 20; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetDropoutDescriptor(cudnnDropoutDescriptor_t one, cudnnHandle_t handle, float p, void *states, size_t nbytes,
                                        unsigned long long seed) {
    (void)one; (void)handle; (void)p;
    if (hollow_computes() && states && nbytes) memcpy(states, (uint64_t[]){seed, 0}, 16);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
    *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
    return CUDNN_STATUS_SUCCESS;
}

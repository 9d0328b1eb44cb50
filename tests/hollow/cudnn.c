/* cuDNN for the hollow GPU: convolutions by its graph API, with two engines to choose from, the first of which wants
   a workspace (HOLLOW_WORKSPACE bytes); batch norm; no recurrent layers. */
#include <cudnn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

#define ENGINES 2

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
                                 ? (int64_t)hollow_number("HOLLOW_WORKSPACE", 128ull << 20)
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

cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t handle, size_t *found) { (void)handle; *found = 1 << 20; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t handle, cudnnRNNDescriptor_t rnn, size_t *found) {
    (void)handle; (void)rnn;
    *found = 0;
    return CUDNN_STATUS_NOT_SUPPORTED;
}
cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
    *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
    return CUDNN_STATUS_SUCCESS;
}

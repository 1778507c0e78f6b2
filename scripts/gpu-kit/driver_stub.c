/* What torch, Triton and vLLM ask of a driver before a GPU is used, as one H100 answers it. For dry_run.py only.
   With NVML defined it is libnvidia-ml.so.1, else libcuda.so.1. */
#ifdef NVML

#include <stdio.h>

typedef struct {
  unsigned long long total, free, used;
} memory_t;

static int device;

static const unsigned long long TOTAL = 85520809984ULL, FREE = 85000000000ULL;

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char* nvmlErrorString(int result) { return "stub"; }

static int count(unsigned* devices) {
  *devices = 1;
  return 0;
}
int nvmlDeviceGetCount(unsigned* devices) { return count(devices); }
int nvmlDeviceGetCount_v2(unsigned* devices) { return count(devices); }

static int handle(void** found) {
  *found = &device;
  return 0;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void** found) { return handle(found); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** found) { return handle(found); }

int nvmlDeviceGetCudaComputeCapability(void* of, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return 0;
}
int nvmlDeviceGetName(void* of, char* name, unsigned nbytes) {
  snprintf(name, nbytes, "NVIDIA H100 80GB HBM3");
  return 0;
}
int nvmlDeviceGetUUID(void* of, char* uuid, unsigned nbytes) {
  snprintf(uuid, nbytes, "GPU-00000000-0000-0000-0000-000000000000");
  return 0;
}
int nvmlSystemGetDriverVersion(char* version, unsigned nbytes) {
  snprintf(version, nbytes, "580.159.04");
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* of, memory_t* memory) {
  memory->total = TOTAL;
  memory->free = FREE;
  memory->used = TOTAL - FREE;
  return 0;
}

/* NVML_ERROR_NOT_SUPPORTED */
int nvmlDeviceGetNumaNodeId(void* of, unsigned* node) { return 3; }
int nvmlDeviceGetP2PStatus(void) { return 3; }

#else

/* CUDA_ERROR_UNKNOWN */
int cuGetProcAddress_v2(void) { return 999; }
int cuPointerGetAttribute(void) { return 999; }
int cuTensorMapEncodeTiled(void) { return 999; }

#endif

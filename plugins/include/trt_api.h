// The TensorRT plugin interface: the SDK's headers where the build was given them, our restatement elsewhere.
#pragma once

#ifdef NEXTN_TENSORRT_HEADERS
#include <NvInferRuntime.h>
#else
#include "trt_plugin_abi.h"
#endif

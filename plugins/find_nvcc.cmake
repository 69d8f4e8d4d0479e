# Included before the language CUDA is switched on. A compiler that is named (CMAKE_CUDA_COMPILER, CUDACXX) or on PATH is
# CMake's own to find. Where there is none, takes that of NVIDIA's pip packages (nvidia-cuda-nvcc and what it needs) from
# the first folder that has them, of CMAKE_PREFIX_PATH and of the Python that runs the build, if one does.
if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
  return()
endif()
find_program(NEXTN_NVCC_ON_PATH nvcc NO_CMAKE_PATH NO_CACHE)
if(NEXTN_NVCC_ON_PATH)
  return()
endif()
set(_python_path "")
if(Python_EXECUTABLE)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import sys; print(*filter(None, sys.path), sep=';', end='')"
    OUTPUT_VARIABLE _python_path COMMAND_ERROR_IS_FATAL ANY)
endif()
foreach(_folder IN LISTS CMAKE_PREFIX_PATH _python_path)
  set(_toolkit "${_folder}/nvidia/cu13")
  if(EXISTS "${_toolkit}/bin/nvcc")
    message(STATUS "CUDA compiler of the pip packages in ${_folder}")
    set(CMAKE_CUDA_COMPILER "${_toolkit}/bin/nvcc" CACHE FILEPATH "")
    set(CUDAToolkit_ROOT "${_toolkit}" CACHE PATH "")
    # The packages lack what CMake and nvcc look for: a folder lib64, and the runtime under its unversioned name.
    set(CMAKE_CUDA_FLAGS_INIT "-L${_toolkit}/lib")
    file(GLOB _runtime "${_toolkit}/lib/libcudart.so.*")
    set(CUDA_CUDART "${_runtime}" CACHE FILEPATH "")
    return()
  endif()
endforeach()
message(FATAL_ERROR
  "No CUDA compiler: nvcc is not on PATH, and CUDACXX does not name one. Either `make plugins` or `pip install .` brings "
  "one from NVIDIA's pip packages; or set CUDACXX.")

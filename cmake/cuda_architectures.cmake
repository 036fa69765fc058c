# Sets `out` to the architectures that an nvcc of this version compiles for: those of the kernels'
# own code, and PTX of the newest for later devices. Before CUDA 12.8 nvcc knows no Blackwell.
function(skyrl_cuda_architectures version out)
  set(architectures 80-real 90a-real 100-real 120)
  if(version VERSION_LESS 12.8)
    set(architectures 80-real 90a-real 90)
  endif()
  set(${out} ${architectures} PARENT_SCOPE)
endfunction()

# What a wheel and `cmake --install` carry, with relative paths only:
#   lib/libddp.so   include/libddp/...   share/cmake/libddp/   and, for Python, _C.*.so
# In a wheel the prefix is site-packages/libddp, so torch stands in ../torch.

include(CMakePackageConfigHelpers)

set_target_properties(libddp PROPERTIES INSTALL_RPATH "$ORIGIN/../../torch/lib")
install(TARGETS libddp LIBRARY DESTINATION lib COMPONENT library)
install(TARGETS libddp_keeper RUNTIME DESTINATION bin COMPONENT library)
# What docs/api.md names, and what that includes; tests/house holds the list to both.
set(public_headers
    activation/checkpoint.h
    activation/checkpoint_node.h
    autograd/output_tensors.h
    base/deadline.h
    base/dtype.h
    base/error.h
    base/first_line.h
    base/group_failure.h
    base/group_identity.h
    base/monotonic_clock.h
    base/op_description.h
    base/process.h
    base/reduce_op.h
    ddp/bucket_layout.h
    ddp/bucket_plan.h
    ddp/compress_hook.h
    ddp/distributed_data_parallel.h
    ddp/gradient_buckets.h
    ddp/options.h
    ddp/pass_timeline.h
    ddp/replicated_model.h
    ddp/sharded_parameters.h
    ddp/sparse_modules.h
    ddp/sync_batch_norm.h
    ddp/uneven_inputs.h
    elastic/rejoin.h
    fsdp/clip_grad_norm.h
    fsdp/copy_options.h
    fsdp/full_state.h
    fsdp/fully_shard.h
    fsdp/fully_sharded_data_parallel.h
    fsdp/no_sync.h
    fsdp/owned_tensors.h
    fsdp/param_group.h
    fsdp/parameter_faces.h
    fsdp/reduce_hook.h
    fsdp/shard_options.h
    fsdp/sharded_model.h
    fsdp/sharded_model_options.h
    fsdp/wrapped_module.h
    group/backend.h
    group/init_process_group.h
    group/process_group.h
    group/required_group.h
    group/work.h
    interop/c10d_backend.h
    interop/from_c10d.h
    interop/gloo_engine.h
    interop/inter_engine.h
    libddp.h
    module/broadcast_tensors.h
    module/module_tensors.h
    module/named_tensor.h
    optim/adamw.h
    rendezvous/rendezvous.h
    snapshot/snapshot.h
    snapshot/snapshot_tensor.h
    training/training_state.h
)
foreach(header IN LISTS public_headers)
    get_filename_component(room "${header}" DIRECTORY)
    install(FILES "${PROJECT_SOURCE_DIR}/libddp/${header}" DESTINATION "include/libddp/${room}")
endforeach()
if(TARGET _C)
    set_target_properties(_C PROPERTIES INSTALL_RPATH "$ORIGIN/lib;$ORIGIN/../torch/lib")
    install(TARGETS _C LIBRARY DESTINATION .)
endif()

set(config_dir share/cmake/libddp)
configure_package_config_file(
    "${PROJECT_SOURCE_DIR}/libddp/cmake/libddp-config.cmake.in"
    "${PROJECT_BINARY_DIR}/libddp-config.cmake"
    INSTALL_DESTINATION ${config_dir}
)
write_basic_package_version_file(
    "${PROJECT_BINARY_DIR}/libddp-config-version.cmake"
    COMPATIBILITY SameMinorVersion
)
install(
    FILES
        "${PROJECT_BINARY_DIR}/libddp-config.cmake"
        "${PROJECT_BINARY_DIR}/libddp-config-version.cmake"
        "${PROJECT_SOURCE_DIR}/libddp/cmake/Torch.cmake"
    DESTINATION ${config_dir}
)

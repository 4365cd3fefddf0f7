#pragma once

// The whole public C++ interface.
//
//   #include <libddp/libddp.h>
//
//   libddp::Group group = libddp::init_process_group({});
//   group->all_reduce(tensor);
//   libddp::DistributedDataParallel model(net, group);
//   libddp::FullyShardedDataParallel sharded(net, {.shard = group});
//   libddp::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(3e-4));
//   group->shutdown();

#include "libddp/activation/checkpoint.h"
#include "libddp/base/error.h"
#include "libddp/ddp/compress_hook.h"
#include "libddp/ddp/distributed_data_parallel.h"
#include "libddp/elastic/rejoin.h"
#include "libddp/fsdp/fully_sharded_data_parallel.h"
#include "libddp/group/init_process_group.h"
#include "libddp/group/process_group.h"
#include "libddp/optim/adamw.h"
#include "libddp/rendezvous/rendezvous.h"
#include "libddp/snapshot/snapshot.h"
#include "libddp/training/training_state.h"

#include "communicator/mpi/world.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/process_end.h"
#include "base/threads.h"
#include "communicator/mpi/environment.h"
#include "communicator/mpi/library.h"
#include "communicator/mpi/pmi.h"
#include "communicator/mpi/preconditions.h"
#include "communicator/mpi/segments.h"
#include "communicator/mpi/trial.h"
#include "communicator/mpi/tuning.h"
#include "memory/libraries.h"
#include "progress/backoff.h"

namespace hbm::communicator::mpi {
namespace {

// Throws in a forked child, which can neither use nor query MPI's state.
void require_owner(const ForkGuard& fork) {
  if (!fork.in_child()) return;
  throw Error(ErrorKind::kUnavailable,
              "MPI was initialised in the parent of this forked process, and cannot be used here; "
              "start processes that communicate with the spawn method");
}

std::mutex creation;     // guards `world`; held by form(), launched() and current()
World* world = nullptr;  // never destroyed, like MPI

// MPICH 5.0.2 sends its addresses over PMI from buffers whose unused end it has not cleared.
// Earlier calls, such as loads of libraries, leave data there, and the PMI lines get longer.
// Slurm's mpi/pmi2 takes 1,024 bytes a line, so MPI_Init may fail. With libnuma loaded first,
// MPI_Init has not been seen to fail (tests/python/collectives/test_launchers.py runs under Slurm).
void load_before_mpi() { memory::libraries(); }

std::atomic<bool> has_segment_names{false};  // MPI's segments may have names in /dev/shm
std::atomic<int> initialising{0};            // threads in MPI_Init; sequentially consistent

// Runs at the end of the process, and unlinks the names of MPI's segments as ~UnlinkedSegments
// does. That destructor may not run, because the thread that forms a group may sleep for ever by
// then (park()).
void end_initialisation() {
  if (!has_segment_names.load()) return;
  const auto until = std::chrono::steady_clock::now() + kInitialisationEndTimeout;
  while (initialising.load() > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(kInitialisationEndCheckPeriod);
  }
  unlink_segments();
}

// Unlinks the names of MPI's segments after every rank has mapped them, or the start has failed, or
// when the process ends.
struct UnlinkedSegments {
  UnlinkedSegments() {
    has_segment_names.store(true);
    at_process_end(&end_initialisation);
  }
  ~UnlinkedSegments() {
    unlink_segments();
    has_segment_names.store(false);
  }
};

// The thread counts itself, and then checks whether the process ends. end_initialisation() reads
// the count after the flag of the end (process_end::begun) is set. So either this thread sees the
// flag, or end_initialisation() sees the count.
void initialise(const Api& mpi) {
  struct Counted {
    Counted() { initialising.fetch_add(1); }
    ~Counted() { initialising.fetch_sub(1); }
  };
  set_transport_defaults();
  std::optional<Counted> counted(std::in_place);
  if (must_park()) {
    counted.reset();
    park();
  }
  mpi.initialise();
}

void require_threads(const Api& mpi, const std::string& origin) {
  if (mpi.threads_multiple()) return;
  throw Error(ErrorKind::kUnavailable,
              "MPI was initialised by " + origin +
                  " without MPI_THREAD_MULTIPLE, which hbm needs; ask for it there (mpi4py: "
                  "mpi4py.rc.thread_level = \"multiple\", the default) or let hbm come first");
}

bool is_initialised(const Api& mpi) {
  if (mpi.finalised()) {
    throw Error(ErrorKind::kUnavailable,
                "MPI was finalised in this process, and cannot be initialised again; create the "
                "hbm group before MPI.Finalize()");
  }
  return mpi.initialised();
}

// Throws unless MPI has the rank and the size that the responder has given.
void require_pmi(const MpiLibrary& library, int rank, int size) {
  const Api& mpi = *library.api;
  if (mpi.rank() == rank && mpi.size() == size) return;
  throw Error(ErrorKind::kUnavailable,
              library.path + " (" + mpi.version() + ") takes this process for rank " +
                  std::to_string(mpi.rank()) + " of " + std::to_string(mpi.size()) +
                  ", and hbm had told it rank " + std::to_string(rank) + " of " +
                  std::to_string(size) +
                  ": it does not speak PMI-1, by which hbm forms jobs. Start with that library's "
                  "mpiexec and init_method=\"mpi://\", or install MPICH (pip install mpich)");
}

// Throws if the launcher offers only PMIx and the library has none: MPI_Init would end the process.
void require_launcher(const MpiLibrary& library) {
  const char* pmix = std::getenv("PMIX_NAMESPACE");
  if (pmix == nullptr || library.speaks_pmix) return;
  for (const char* pmi : {"PMI_FD", "PMI_PORT", "PMI_RANK"}) {
    if (std::getenv(pmi) != nullptr) return;
  }
  throw Error(
      ErrorKind::kUnavailable,
      "the launcher (PMIX_NAMESPACE=" + std::string(pmix) + ") speaks PMIx, and " + library.path +
          " (" + library.api->version() +
          ") does not. Start with MPICH's mpiexec or with `srun --mpi=pmi2`; under Open "
          "MPI's mpiexec name the libmpi_abi.so.1 of Open MPI 6 in HBMCOMM_MPI_LIB; or take "
          "the ranks from RANK and WORLD_SIZE, and not from MPI (docs/running.md, "
          "\"Slurm\")");
}

}  // namespace

World::World(const MpiLibrary& library, std::string id, const std::string& origin,
             std::shared_ptr<Arrivals> arrivals, std::shared_ptr<PmiResponder> responder)
    : mpi_(*library.api),
      arrivals_(std::move(arrivals)),
      responder_(std::move(responder)),
      id_(std::move(id)),
      rank_(mpi_.rank()),
      size_(mpi_.size()) {
  require_threads(mpi_, origin);
  mpi_.return_errors();
  log::info("MPI world of " + std::to_string(size_) + " (" + origin + "), " + mpi_.version() +
            ", " + library.path);
}

World* World::current() {
  const std::lock_guard lock(creation);
  if (world != nullptr) require_owner(world->fork_);
  if (world == nullptr && already_loaded() && is_initialised(*library().api)) {
    world = new World(library(), "", "code that ran before hbm, such as mpi4py");
  }
  return world;
}

World& World::form(std::shared_ptr<bootstrap::KeyValue> store, const std::string& id, int rank,
                   int size, const std::vector<int>& node_of, Deadline deadline,
                   const std::function<void()>& check, const std::string& risks) {
  const std::lock_guard lock(creation);
  const MpiLibrary& found = library();
  const Api& mpi = *found.api;
  const StartEnvironment environment;
  set_transport_defaults();
  PmiResponder::Job job{id, rank, size, node_of, deadline};
  if (!risks.empty()) {
    PmiResponder::Job trial = job;
    trial.name += "trial";
    trial.is_elsewhere = true;
    try_initialise(found, store, trial, risks, check);
  }
  const UnlinkedSegments unlinked;
  // The responder outlives this call if MPI_Init never returns.
  auto responder = std::make_shared<PmiResponder>(store, job);
  const auto arrivals = std::make_shared<Arrivals>();
  if (!run_abandonable([&mpi, responder] { initialise(mpi); }, deadline, check)) {
    throw Error(ErrorKind::kTimeout,
                "MPI_Init did not finish in time on rank " + std::to_string(rank) +
                    ": a rank ended while the ranks were connecting, or MPI found no way between "
                    "the nodes (see docs/running.md, \"Networks\")");
  }
  arrivals->collect();
  require_pmi(found, rank, size);
  // All ranks have mapped the segments when MPI_Init has returned on all.
  const std::string key = id + "/initialised";
  if (store->add(key, 1, deadline) == size) store->set(key + "/all", "1", deadline);
  if (!bootstrap::await_keys(*store, {key + "/all"}, deadline, check)) {
    throw Error(ErrorKind::kTimeout, "not every rank came out of MPI_Init in time");
  }
  responder->release_store();
  world = new World(found, id, "hbm, through its own PMI", arrivals, responder);
  return *world;
}

World& World::launched(Deadline deadline) {
  const std::lock_guard lock(creation);
  if (world != nullptr) {
    require_owner(world->fork_);
    return *world;
  }
  const MpiLibrary& found = library();
  const Api& mpi = *found.api;
  const bool ours = !is_initialised(mpi);
  if (ours) {
    require_launcher(found);
    // The number of ranks is not known yet, so the check is for one rank.
    require_start(1, 1);
  }
  if (!ours) {
    world = new World(found, "", "code that ran before hbm");
    return *world;
  }
  load_before_mpi();
  const UnlinkedSegments unlinked;
  const auto arrivals = std::make_shared<Arrivals>();
  if (!run_abandonable([&mpi] { initialise(mpi); }, deadline)) {
    throw Error(ErrorKind::kTimeout,
                "MPI_Init did not finish in time: not every rank that the launcher started came");
  }
  arrivals->collect();
  world = new World(found, "", "hbm, through the launcher", arrivals);
  if (!world->meet(deadline)) {
    throw Error(ErrorKind::kTimeout, "not every rank of the launcher's job came in time");
  }
  return *world;
}

std::shared_ptr<Comm> World::communicator(const std::vector<int>& world_ranks, int tag,
                                          Deadline deadline, const std::function<void()>& check) {
  auto created = std::make_shared<CommHandle>();
  const auto create = [this, world_ranks, tag, created] {
    *created = mpi_.create(world_ranks, tag);
  };
  if (!run_abandonable(create, deadline, check)) {
    throw Error(
        ErrorKind::kTimeout,
        "MPI_Comm_create_group did not finish in time: a rank of the group ended meanwhile");
  }
  // The library outlives every communicator, so nothing owns the functions.
  return std::make_shared<Comm>(std::shared_ptr<const Carrier>(std::shared_ptr<void>(), &mpi_),
                                *created);
}

std::string World::broadcast(std::string value, Deadline deadline) {
  // The call may outlive this function.
  auto sent = std::make_shared<std::string>(std::move(value));
  const auto call = [this, sent] {
    uint64_t size = sent->size();
    mpi_.broadcast(&size, sizeof size);
    sent->resize(size);
    mpi_.broadcast(sent->data(), size);
  };
  if (!run_abandonable(call, deadline)) {
    throw Error(ErrorKind::kTimeout, "rank 0's word did not reach this rank over MPI in time");
  }
  return *sent;
}

bool World::meet(Deadline deadline) {
  Request all = mpi_.barrier();
  progress::Backoff backoff(true);
  for (;; backoff.pause()) {
    if (mpi_.test(all, "MPI_Ibarrier")) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
}

void World::finalize_together(std::chrono::milliseconds timeout) noexcept {
  try {
    if (!is_initialised(mpi_)) return;
    const Deadline deadline = std::chrono::steady_clock::now() + timeout;
    if (meet(deadline)) run_abandonable([this] { mpi_.finalise(); }, deadline + timeout);
  } catch (const std::exception& error) {
    log::info(std::string("MPI was left without MPI_Finalize: ") + error.what());
  }
}

}  // namespace hbm::communicator::mpi

#include "communicator/mpi/world.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/threads.h"
#include "communicator/mpi/pmi.h"
#include "progress/backoff.h"

namespace hbm::mpi {
namespace {

// MPI's state cannot be used by a forked child, which must not even ask for it.
void require_owner(const ForkGuard& fork) {
  if (!fork.in_child()) return;
  throw Error(ErrorKind::kUnavailable,
              "MPI was initialised in the parent of this forked process, and cannot be used here; "
              "start processes that communicate with the spawn method");
}

std::mutex creation;     // guards the making of the world; held by form(), launched(), current()
World* world = nullptr;  // never destroyed, as MPI is not

// Keeps MPICH from what kills a survivor, unless the user said otherwise: UCX's cross-memory
// attach aborts this process when the peer dies in mid-copy.
void set_transport_defaults() {
  if (std::getenv("UCX_TLS") == nullptr) setenv("UCX_TLS", "^cma", 1);
}

// Puts a launcher's PMI variables out of MPI's sight while the responder forms a world of its own.
class HiddenLauncher {
 public:
  HiddenLauncher() {
    for (size_t i = 0; i < kNames.size(); ++i) {
      if (const char* value = std::getenv(kNames[i])) saved_[i] = value;
      unsetenv(kNames[i]);
    }
  }
  ~HiddenLauncher() {
    for (size_t i = 0; i < kNames.size(); ++i) {
      if (saved_[i]) setenv(kNames[i], saved_[i]->c_str(), 1);
    }
  }

 private:
  static constexpr std::array<const char*, 7> kNames = {
      "PMI_FD", "PMI_RANK", "PMI_SIZE", "PMI_PORT", "PMI_ID", "PMI_LOCAL_RANK", "PMIX_NAMESPACE"};
  std::array<std::optional<std::string>, kNames.size()> saved_;
};

void initialise(const MpiLibrary& mpi) {
  set_transport_defaults();
  int provided = 0;
  mpi.check(mpi.Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
}

void require_threads(const MpiLibrary& mpi, const std::string& origin) {
  int provided = 0;
  mpi.check(mpi.Query_thread(&provided), "MPI_Query_thread");
  if (provided == MPI_THREAD_MULTIPLE) return;
  throw Error(ErrorKind::kUnavailable,
              "MPI was initialised by " + origin +
                  " without MPI_THREAD_MULTIPLE, which hbm needs; ask for it there (mpi4py: "
                  "mpi4py.rc.thread_level = \"multiple\", the default) or let hbm come first");
}

bool is_initialised(const MpiLibrary& mpi) {
  int initialised = 0;
  int finalized = 0;
  mpi.Initialized(&initialised);
  mpi.Finalized(&finalized);
  if (finalized != 0) {
    throw Error(ErrorKind::kUnavailable,
                "MPI was finalised in this process, and cannot be initialised again; create the "
                "hbm group before MPI.Finalize()");
  }
  return initialised != 0;
}

// MPICH leaves its shared segment's name behind when a process is killed. Once every rank has
// mapped the segment it needs no name; those that this process maps are its job's own.
void unlink_segments() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find("/dev/shm/mpich_shm_");
    if (path != std::string::npos) unlink(line.c_str() + path);
  }
}

}  // namespace

World::World(const MpiLibrary& library, std::string id, std::string origin)
    : mpi_(library), id_(std::move(id)), origin_(std::move(origin)) {
  require_threads(mpi_, origin_);
  mpi_.Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  mpi_.Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  mpi_.check(mpi_.Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  mpi_.check(mpi_.Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
  log::info("MPI world of " + std::to_string(size_) + " (" + origin_ + "), " + mpi_.version + ", " +
            mpi_.path);
}

World* World::current() {
  const std::lock_guard lock(creation);
  if (world != nullptr) require_owner(world->fork_);
  if (world == nullptr && already_loaded() && is_initialised(library())) {
    world = new World(library(), "", "code that ran before hbm, such as mpi4py");
  }
  return world;
}

World& World::form(std::shared_ptr<KeyValue> store, const std::string& id, int rank, int size,
                   const std::vector<int>& node_of, Deadline deadline) {
  const std::lock_guard lock(creation);
  const MpiLibrary& mpi = library();
  const HiddenLauncher hidden;
  // Both outlive this call if MPI_Init never returns.
  auto responder =
      std::make_shared<PmiResponder>(store, PmiResponder::Job{id, rank, size, node_of, deadline});
  if (!run_abandonable([&mpi, responder] { initialise(mpi); }, deadline)) {
    throw Error(ErrorKind::kTimeout,
                "MPI_Init did not finish in time on rank " + std::to_string(rank) +
                    ": a rank ended while the ranks were connecting, or MPI found no way between "
                    "the nodes (see docs/running.md, \"Networks\")");
  }
  responder.reset();
  // Everyone has mapped the segment once everyone is out of MPI_Init.
  const std::string key = id + "/initialised";
  if (store->add(key, 1) == size) store->set(key + "/all", "1");
  if (!store->wait({key + "/all"}, deadline)) {
    throw Error(ErrorKind::kTimeout, "not every rank came out of MPI_Init in time");
  }
  unlink_segments();
  world = new World(mpi, id, "hbm, through its own PMI");
  return *world;
}

World& World::launched(Deadline deadline) {
  const std::lock_guard lock(creation);
  if (world != nullptr) {
    require_owner(world->fork_);
    return *world;
  }
  const MpiLibrary& mpi = library();
  const bool ours = !is_initialised(mpi);
  if (ours && !run_abandonable([&mpi] { initialise(mpi); }, deadline)) {
    throw Error(ErrorKind::kTimeout,
                "MPI_Init did not finish in time: not every rank that the launcher started came");
  }
  world = new World(mpi, "", ours ? "hbm, through the launcher" : "code that ran before hbm");
  if (!ours) return *world;
  if (!world->meet(deadline)) {
    throw Error(ErrorKind::kTimeout, "not every rank of the launcher's job came in time");
  }
  unlink_segments();
  return *world;
}

std::shared_ptr<Comm> World::communicator(const std::vector<int>& world_ranks, int tag,
                                          Deadline deadline) {
  auto created = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  const auto create = [this, world_ranks, tag, created] {
    MPI_Group everyone = MPI_GROUP_NULL;
    MPI_Group members = MPI_GROUP_NULL;
    mpi_.check(mpi_.Comm_group(MPI_COMM_WORLD, &everyone), "MPI_Comm_group");
    mpi_.check(mpi_.Group_incl(everyone, static_cast<int>(world_ranks.size()), world_ranks.data(),
                               &members),
               "MPI_Group_incl");
    mpi_.check(mpi_.Comm_create_group(MPI_COMM_WORLD, members, tag, created.get()),
               "MPI_Comm_create_group");
    mpi_.Group_free(&members);
    mpi_.Group_free(&everyone);
  };
  if (!run_abandonable(create, deadline)) {
    throw Error(
        ErrorKind::kTimeout,
        "MPI_Comm_create_group did not finish in time: a rank of the group ended meanwhile");
  }
  return std::make_shared<Comm>(mpi_, *created);
}

std::string World::broadcast(std::string value, Deadline deadline) {
  auto sent = std::make_shared<std::string>(std::move(value));  // the call may outlive this one
  const auto call = [this, sent] {
    auto size = static_cast<unsigned long>(sent->size());
    mpi_.check(mpi_.Bcast(&size, 1, MPI_UNSIGNED_LONG, 0, MPI_COMM_WORLD), "MPI_Bcast");
    sent->resize(size);
    mpi_.check(mpi_.Bcast(sent->data(), static_cast<int>(size), MPI_BYTE, 0, MPI_COMM_WORLD),
               "MPI_Bcast");
  };
  if (!run_abandonable(call, deadline)) {
    throw Error(ErrorKind::kTimeout, "rank 0's word did not reach this rank over MPI in time");
  }
  return *sent;
}

bool World::meet(Deadline deadline) {
  MPI_Request all = MPI_REQUEST_NULL;
  mpi_.check(mpi_.Ibarrier(MPI_COMM_WORLD, &all), "MPI_Ibarrier");
  Backoff backoff(true);
  for (;; backoff.pause()) {
    int met = 0;
    mpi_.check(mpi_.Test(&all, &met, MPI_STATUS_IGNORE), "MPI_Test");
    if (met != 0) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
}

void World::finalize_together(std::chrono::milliseconds patience) noexcept {
  try {
    if (!is_initialised(mpi_)) return;
    const Deadline deadline = std::chrono::steady_clock::now() + patience;
    if (meet(deadline)) run_abandonable([this] { mpi_.Finalize(); }, deadline + patience);
  } catch (const std::exception& error) {
    log::info(std::string("MPI was left without MPI_Finalize: ") + error.what());
  }
}

}  // namespace hbm::mpi

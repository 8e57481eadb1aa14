#include "process_group/flight_record.h"

#include <torch/csrc/jit/serialization/pickle.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

namespace hbm::process_group {
namespace {

using Dict = c10::impl::GenericDict;

// The version of the format, from PyTorch's FlightRecorder.hpp.
constexpr const char* kFormat = "2.10";

bool is_message(const FlightRecord::Issued& issued) { return c10d::isP2POp(issued.kind->type); }

std::string reader_name(const FlightRecord::Issued& issued, int rank) {
  const std::string name = std::string("gloo:") + issued.kind->recorded;
  if (!is_message(issued)) return name;
  const bool sends = issued.kind->type == c10d::OpType::SEND;
  return name + " " + std::to_string(rank) + (sends ? "->" : "<-") +
         std::to_string(std::max(issued.peer, 0));
}

int64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME_COARSE, &now);  // precise to a few ms, but five times as fast
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

Dict string_dict() { return Dict(c10::StringType::get(), c10::AnyType::get()); }

c10::impl::GenericList list_of(std::initializer_list<c10::IValue> values) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const c10::IValue& value : values) list.push_back(value);
  return list;
}

std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return "[" + text + "]";
}

// Returns the file to which PyTorch's own flight recorder would write. So PyTorch's `fr_trace`
// finds this record there.
std::filesystem::path file_of(int rank) {
  for (const char* name : {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}) {
    if (const char* prefix = std::getenv(name)) return prefix + std::to_string(rank);
  }
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const std::filesystem::path folder =
      cache ? std::filesystem::path(cache)
            : (home ? std::filesystem::path(home) / ".cache" : std::filesystem::path("/tmp"));
  return folder / "torch" / ("comm_lib_trace_rank_" + std::to_string(rank));
}

// Writes to a temporary file and renames it to `file`, so that a reader never sees half a record.
// Returns the reason if this fails, else an empty string.
std::string written(const std::filesystem::path& file, const std::vector<char>& bytes) {
  std::error_code failed;
  if (file.has_parent_path()) std::filesystem::create_directories(file.parent_path(), failed);
  const std::filesystem::path part = file.string() + ".part" + std::to_string(getpid());
  errno = 0;
  std::ofstream stream(part, std::ios::binary);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  stream.close();
  if (!stream) return std::strerror(errno);
  std::filesystem::rename(part, file, failed);
  return failed ? failed.message() : "";
}

}  // namespace

struct FlightRecord::AllRecords {
  std::mutex mutex;
  std::vector<const FlightRecord*> records;  // oldest first
};

FlightRecord::FlightRecord(const c10d::Backend& group, std::vector<int> global_ranks)
    : group_(group), global_ranks_(std::move(global_ranks)) {
  auto& all_records = per_process<AllRecords>();
  const std::lock_guard lock(all_records.mutex);
  all_records.records.push_back(this);
}

FlightRecord::~FlightRecord() {
  if (fork_.in_child()) return;
  auto& all_records = per_process<AllRecords>();
  const std::lock_guard lock(all_records.mutex);
  std::erase(all_records.records, this);
}

uint64_t FlightRecord::enter(Issued issued,
                             std::shared_ptr<const progress::Request> request) noexcept {
  const int64_t now = now_ns();
  std::shared_ptr<const progress::Request> dropped;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  if (is_message(issued)) issued.sequence = ++messages_;
  Entry& entry = recent_[entered_ % kRecordedOperations];
  dropped = std::move(entry.request);
  entry = {issued, ++entered_, now, false, std::move(request)};
  return entered_;
}

void FlightRecord::finish(uint64_t number) noexcept {
  const std::lock_guard lock(mutex_);
  Entry& entry = recent_[(number - 1) % kRecordedOperations];
  if (entry.number == number) entry.finished = true;
}

std::vector<FlightRecord::Entry> FlightRecord::entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<Entry> entries;
  for (uint64_t at = entered_ - std::min<uint64_t>(entered_, kRecordedOperations); at < entered_;
       ++at) {
    Entry entry = recent_[at % kRecordedOperations];
    if (entry.request) entry.finished = entry.request->done() && !entry.request->error();
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::string FlightRecord::unfinished(const std::vector<Entry>& entries) const {
  std::string text;
  uint64_t latest = 0;
  for (const Entry& entry : entries) {
    if (entry.finished) {
      if (!is_message(entry.issued)) latest = std::max(latest, entry.issued.sequence);
      continue;
    }
    const int64_t tenths = std::max<int64_t>(now_ns() - entry.entered_ns, 0) / 100'000'000;
    text += (text.empty() ? "" : ", ") + c10d::opTypeToString(entry.issued.kind->type) + " #" +
            std::to_string(entry.issued.sequence) + " of " +
            std::to_string(std::max(entry.issued.input_elements, entry.issued.output_elements)) +
            " " + c10::toString(entry.issued.dtype) + " for " + std::to_string(tenths / 10) + "." +
            std::to_string(tenths % 10) + " s";
  }
  return "group \"" + group_.getGroupUid() + "\" (ranks " + listed(global_ranks_) + ", " +
         std::to_string(latest) + " collectives done): " + (text.empty() ? "idle" : text);
}

std::string FlightRecord::write() const {
  Dict groups = string_dict();
  Dict states = string_dict();
  c10::impl::GenericList all(c10::AnyType::get());
  std::string lines;

  auto& all_records = per_process<AllRecords>();
  const std::lock_guard lock(all_records.mutex);
  for (const FlightRecord* const record : all_records.records) {
    const std::string& name = record->group_.getGroupUid();
    const std::string& description = record->group_.getGroupDesc();
    const std::vector<Entry> entries = record->entries();
    lines += "; " + record->unfinished(entries);
    Dict group = string_dict();
    group.insert("name", name);
    group.insert("desc", description);
    group.insert("ranks", listed(record->global_ranks_));
    groups.insert(name, group);
    int64_t entered = 0;
    int64_t started = 0;
    int64_t completed = 0;
    for (const Entry& entry : entries) {
      const Issued& issued = entry.issued;
      const bool message = is_message(issued);
      const auto sequence = static_cast<int64_t>(issued.sequence);
      // A collective begins when all earlier collectives are finished; a message begins
      // immediately.
      const bool begun = message || entry.finished || started == completed;
      if (!message) {
        entered = sequence;
        if (begun) started = sequence;
        if (entry.finished) completed = sequence;
      }
      Dict line = string_dict();
      line.insert("record_id", static_cast<int64_t>(entry.number));
      line.insert("pg_id", static_cast<int64_t>(groups.size() - 1));
      line.insert("process_group", c10::ivalue::Tuple::create({name, description}));
      line.insert("collective_seq_id", message ? int64_t{0} : sequence);
      line.insert("p2p_seq_id", message ? sequence : int64_t{0});
      line.insert("op_id", static_cast<int64_t>(entry.number));
      line.insert("profiling_name", reader_name(issued, record->group_.getRank()));
      line.insert("time_created_ns", entry.entered_ns);
      line.insert("input_sizes", list_of({list_of({issued.input_elements})}));
      line.insert("output_sizes", list_of({list_of({issued.output_elements})}));
      line.insert("input_dtypes", list_of({c10::toString(issued.dtype)}));
      line.insert("output_dtypes", list_of({c10::toString(issued.dtype)}));
      line.insert("state", entry.finished ? "completed" : begun ? "started" : "scheduled");
      line.insert("time_discovered_started_ns", c10::IValue());
      line.insert("time_discovered_completed_ns", c10::IValue());
      line.insert("timeout_ms", static_cast<int64_t>(issued.timeout.count()));
      line.insert("retired", entry.finished);
      line.insert("is_p2p", message);
      line.insert("frames", c10::impl::GenericList(c10::AnyType::get()));
      all.push_back(line);
    }
    Dict state = string_dict();
    state.insert("last_enqueued_collective", entered);
    state.insert("last_started_collective", started);
    state.insert("last_completed_collective", completed);
    states.insert(std::to_string(groups.size() - 1), state);
  }
  Dict whole = string_dict();
  whole.insert("version", kFormat);
  whole.insert("pg_config", groups);
  whole.insert("pg_status", states);
  whole.insert("entries", all);

  const std::filesystem::path file = file_of(global_ranks_[static_cast<size_t>(group_.getRank())]);
  const std::string why_not = written(file, torch::jit::pickle(whole));
  return (why_not.empty() ? "for torch.distributed.flight_recorder in " + file.string()
                          : "no file, as " + file.string() + " cannot be written: " + why_not) +
         lines;
}

}  // namespace hbm::process_group

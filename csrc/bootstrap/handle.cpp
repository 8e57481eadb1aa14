#include "bootstrap/handle.h"

#include <algorithm>
#include <sstream>
#include <tuple>

#include "base/boot_id.h"
#include "base/error.h"
#include "base/tcp.h"
#include "bootstrap/rendezvous.h"

namespace hbm::bootstrap {
namespace {

constexpr const char* kFormat = "hbm-handle-1";  // the first word of a handle's text

}  // namespace

std::string network_id() { return boot_id() + "/" + network_namespace(); }

Handle make_handle(int port) {
  return {.id = random_id(),
          .process = own_claim(),
          .network = network_id(),
          .port = port,
          .addresses = machine_addresses()};
}

std::string encode(const Handle& handle) {
  std::ostringstream text;
  text << kFormat << ' ' << handle.id << ' ' << handle.port << ' ' << handle.network << ' '
       << handle.addresses.size();
  for (const std::string& address : handle.addresses) text << ' ' << address;
  text << ' ' << encode(handle.process);
  return text.str();
}

Handle decode_handle(const std::string& text) {
  std::istringstream words(text);
  std::string format;
  Handle handle;
  size_t addresses = 0;
  words >> format >> handle.id >> handle.port >> handle.network >> addresses;
  for (std::string address; handle.addresses.size() < addresses && words >> address;) {
    handle.addresses.push_back(address);
  }
  std::string claim;
  if (words && words.get() == ' ' && std::getline(words, claim)) {
    handle.process = decode_claim(claim);
  }
  if (format != kFormat || handle.process.process.empty()) {
    throw Error(ErrorKind::kInvalid,
                "\"" + text +
                    "\" is no handle of hbm: pass the text that reconfigure_handle() has returned "
                    "in each process");
  }
  return handle;
}

Roster make_roster(const std::vector<std::string>& texts, bool ordered, const std::string& own) {
  Roster roster;
  for (const std::string& text : texts) roster.handles.push_back(decode_handle(text));
  if (!ordered) {
    std::ranges::sort(roster.handles, {}, [](const Handle& handle) {
      return std::tie(handle.process.boot_id, handle.network, handle.id);
    });
  }
  std::vector<std::string> ids;
  for (const Handle& handle : roster.handles) {
    if (std::ranges::find(ids, handle.id) != ids.end()) {
      throw Error(ErrorKind::kInvalid, "the handle of " + process_name(handle.process) +
                                           " is named twice; name each member once");
    }
    ids.push_back(handle.id);
  }
  const auto found = std::ranges::find(ids, own);
  if (found == ids.end()) {
    throw Error(ErrorKind::kInvalid,
                "none of the " + std::to_string(ids.size()) +
                    " handles is this process' present one; a handle is spent once its group is "
                    "formed, so ask reconfigure_handle() for the next one");
  }
  roster.rank = static_cast<int>(found - ids.begin());
  return roster;
}

}  // namespace hbm::bootstrap

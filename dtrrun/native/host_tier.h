// Where the copies of versions live that have left the device (`core/host.h`): in a file, or for a GPU in pinned memory.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "backend.h"

namespace dtrrun {

// Free places: ranges of numbers, of which those that touch are merged.
class Places {
 public:
  // Returns the first place of a range of `nbytes`, out of the smallest range that has as many; nullopt if there is none.
  std::optional<int64_t> take(int64_t nbytes) {
    auto fits = by_size_.lower_bound({nbytes, 0});
    if (fits == by_size_.end()) return std::nullopt;
    auto [size, place] = *fits;
    remove(by_place_.find(place));
    if (size > nbytes) insert(place + nbytes, size - nbytes);
    return place;
  }
  void give(int64_t place, int64_t nbytes) {
    auto next = by_place_.lower_bound(place);
    if (next != by_place_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == place) {
        place = before->first;
        nbytes += before->second;
        remove(before);
      }
    }
    if (next != by_place_.end() && place + nbytes == next->first) {
      nbytes += next->second;
      remove(next);
    }
    insert(place, nbytes);
  }
  void clear() {
    by_place_.clear();
    by_size_.clear();
  }

 private:
  using ByPlace = std::map<int64_t, int64_t>;
  void insert(int64_t place, int64_t nbytes) {
    by_place_.emplace(place, nbytes);
    by_size_.emplace(nbytes, place);
  }
  void remove(ByPlace::iterator range) {
    by_size_.erase({range->second, range->first});
    by_place_.erase(range);
  }

  ByPlace by_place_;
  std::set<std::pair<int64_t, int64_t>> by_size_;
};

// What the tiers of PyTorch's storages have in common.
class StorageTier : public HostTier {
 public:
  using HostTier::HostTier;

 protected:
  int64_t size_of(Storage* storage) const override { return static_cast<int64_t>(as_impl(storage)->nbytes()); }
  // Returns new memory for a storage that has been emptied. It is filled, and then moved there.
  static c10::Storage blank(Storage* emptied, int64_t nbytes) {
    return {c10::Storage::use_byte_size_t(), c10::SymInt(nbytes), c10::GetAllocator(as_impl(emptied)->device_type()), /*resizable=*/true};
  }
  static void move_to(Storage* emptied, const c10::Storage& filled) {
    swap_memory(*as_impl(emptied), *filled.unsafeGetStorageImpl());
  }
};

// Copies in a file that has no name, so that nothing remains of it when the process ends, however it ends.
class FileTier final : public StorageTier {
 public:
  // Raises std::system_error if no file can be made in this folder.
  FileTier(const std::string& folder, int64_t most_bytes, double ns_out, double ns_in, bool modelled)
      : StorageTier(most_bytes, ns_out, ns_in, modelled), folder_(folder), pid_(getpid()) {
    begin_file();
  }
  ~FileTier() override {
    for (const File& one : files_) close(one.descriptor);
  }

  // A child has been forked, which goes on reading the copies that there are now. Later ones go to another file.
  void forked() { forks_ = true; }

 protected:
  std::optional<int64_t> write(Storage* storage, int64_t size) override {
    if (getpid() != pid_) return std::nullopt;  // the file is the parent's
    if (std::exchange(forks_, false)) {
      try {
        begin_file();
      } catch (const std::system_error&) {
        forks_ = true;
        return std::nullopt;
      }
    }
    int64_t wanted = rounded(size, -PAGE), room = most_bytes + (most_bytes >> GAPS_SHIFT);
    std::optional<int64_t> place = free_.take(wanted);
    if (!place) {
      if (end_ + wanted - files_.back().first > room) return std::nullopt;
      place = std::exchange(end_, end_ + wanted);
    }
    if (transfer<true>(*place, static_cast<char*>(as_impl(storage)->mutable_data()), size)) {
      files_.back().copies++;
      return place;
    }
    if (*place + wanted == end_)
      end_ = *place;  // the disk is full, or the file may not grow
    else
      free_.give(*place, wanted);
    return std::nullopt;
  }
  void read(int64_t place, int64_t size, Storage* emptied) override {
    c10::Storage memory = blank(emptied, size);
    if (!transfer<false>(place, static_cast<char*>(memory.mutable_data()), size))
      throw std::system_error(errno, std::generic_category(), "dtrrun: cannot read from the file of --host-budget in " + folder_);
    move_to(emptied, memory);
  }
  void release(int64_t place, int64_t size) override {
    auto file = file_of(place);
    file->copies--;
    if (file != std::prev(files_.end())) {  // a child may read it, which has its own descriptor
      if (file->copies == 0) close_file(file);
    } else if (file->copies == 0 && getpid() == pid_ && !forks_ && ftruncate(file->descriptor, 0) == 0) {
      free_.clear();
      end_ = file->first;
    } else {
      free_.give(place, rounded(size, -PAGE));
    }
  }

 private:
  static constexpr int64_t PAGE = 4096;
  static constexpr int GAPS_SHIFT = 3;  // free places may make the file an eighth longer

  struct File {
    int descriptor;
    int64_t first;       // of its places
    int64_t copies = 0;  // that are in it
  };
  using Files = std::vector<File>;

  Files::iterator file_of(int64_t place) {
    return std::prev(std::find_if(files_.rbegin(), files_.rend(), [&](const File& one) { return one.first <= place; }).base());
  }
  void close_file(Files::iterator file) {
    close(file->descriptor);
    files_.erase(file);
  }
  void begin_file() {
    int descriptor = open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (descriptor < 0) {  // not every file system has that
      std::string name = folder_ + "/dtrrun-XXXXXX";
      descriptor = mkostemp(name.data(), O_CLOEXEC);
      if (descriptor < 0) throw std::system_error(errno, std::generic_category(), folder_);
      unlink(name.c_str());
    }
    free_.clear();
    if (!files_.empty() && files_.back().copies == 0) close_file(std::prev(files_.end()));
    files_.push_back({descriptor, end_});
  }

  // Returns false if the system refuses, with the reason in `errno`.
  template <bool out>
  bool transfer(int64_t place, char* memory, int64_t size) {
    auto file = file_of(place);
    std::optional<WithoutGil> released;
    if (size >= LONG) released.emplace();
    for (int64_t done = 0; done < size;) {
      ssize_t count;
      if constexpr (out)
        count = pwrite(file->descriptor, memory + done, static_cast<size_t>(size - done), place - file->first + done);
      else
        count = pread(file->descriptor, memory + done, static_cast<size_t>(size - done), place - file->first + done);
      if (count < 0 && errno == EINTR) continue;
      if (count == 0) errno = EIO;
      if (count <= 0) return false;
      done += count;
    }
    return true;
  }
  static constexpr int64_t LONG = 1 << 18;  // bytes from which the GIL is given up

  const std::string folder_;
  const pid_t pid_;
  Files files_;              // the last one is written to
  int64_t end_ = 0;          // the first place after the last file's
  bool forks_ = false;
  Places free_;
};

// Copies in pinned memory. They are ordered by the program's own stream, so what is copied out may be freed at once: whatever gets
// the block next runs later on that stream.
class PinnedTier final : public StorageTier {
 public:
  PinnedTier(const SessionBackend& backend, int64_t most_bytes, double ns_out, double ns_in, bool modelled)
      : StorageTier(most_bytes, ns_out, ns_in, modelled), backend_(backend) {}

 protected:
  std::optional<int64_t> write(Storage* storage, int64_t size) override {
    if (!is_bound()) return std::nullopt;
    int64_t wanted = rounded(size, -ALIGNMENT);
    std::optional<int64_t> place = free_.take(wanted);
    if (!place && grow(wanted)) place = free_.take(wanted);
    if (!place) return std::nullopt;
    copy(*place, size, c10::Storage(ImplRef::reclaim_copy(as_impl(storage))), /*out=*/true);
    copies_++;
    return place;
  }
  void read(int64_t place, int64_t size, Storage* emptied) override {
    OnMainStream now(home());
    std::optional<c10::Storage> memory;
    Shortage::Kernel::run(/*locked=*/true, /*own=*/true, [&] { memory = blank(emptied, size); });
    copy(place, size, *memory, /*out=*/false);
    move_to(emptied, *memory);
  }
  void release(int64_t place, int64_t size) override {
    if (--copies_ != 0) return free_.give(place, rounded(size, -ALIGNMENT));
    free_.clear();
    chunks_.clear();  // PyTorch keeps them for others, once the last copy from there is over
    pinned_ = 0;
  }
  bool is_timed(const Traffic& way) const override { return way.nbytes < MEASURED; }

 private:
  static constexpr int64_t CHUNK = int64_t{256} << 20, ALIGNMENT = 512;
  static constexpr int64_t MEASURED = 64 << 20;  // bytes in each direction, for which the host waits

  // While it lives, this thread's operators run on the program's main stream, unseen. The thread's own stream waits for them.
  class OnMainStream {
   public:
    explicit OnMainStream(const c10::Stream& home) : stream_(home) {}
    ~OnMainStream() {
      if (stream_.original_stream() == stream_.current_stream()) return;
      c10::Event done(stream_.current_stream().device_type());
      done.record(stream_.current_stream());
      done.block(stream_.original_stream());
    }
    OnMainStream(const OnMainStream&) = delete;

   private:
    Off off_;
    c10::impl::ExcludeDispatchKeyGuard beneath_the_program_{WayIn::ABOVE};
    c10::InferenceMode no_inference_{false};
    c10::StreamGuard stream_;
  };

  struct Chunk {
    at::Tensor memory;
    int64_t first;  // of its places
  };

  // Pins one more chunk, in which so many bytes fit. Returns false if that is more than is allowed, or the system refuses.
  bool grow(int64_t wanted) {
    // PyTorch pins powers of two.
    auto left = static_cast<uint64_t>(most_bytes - pinned_), size = std::bit_ceil(static_cast<uint64_t>(std::max(CHUNK, wanted)));
    size = std::min(size, std::bit_floor(left));
    if (size < static_cast<uint64_t>(wanted)) return false;
    try {
      Off off;
      c10::impl::ExcludeDispatchKeyGuard beneath_the_program(WayIn::ABOVE);
      at::Tensor memory = at::empty({static_cast<int64_t>(size)}, at::TensorOptions(at::kByte).pinned_memory(true));
      chunks_.push_back({std::move(memory), next_});
    } catch (const c10::Error&) {
      return false;
    }
    free_.give(next_, static_cast<int64_t>(size));
    next_ += static_cast<int64_t>(size) + ALIGNMENT;  // chunks never merge
    pinned_ += static_cast<int64_t>(size);
    return true;
  }
  void copy(int64_t place, int64_t size, const c10::Storage& storage, bool out) {
    auto chunk = std::find_if(chunks_.rbegin(), chunks_.rend(), [&](const Chunk& one) { return one.first <= place; });
    OnMainStream now(home());
    at::Tensor there = chunk->memory.narrow(0, place - chunk->first, size), here = Geometry(size).over(storage);
    bool measured = is_timed(out ? this->out() : in());
    if (measured) home().synchronize();
    if (out)
      there.copy_(here, /*non_blocking=*/true);
    else
      here.copy_(there, /*non_blocking=*/true);
    if (measured) home().synchronize();
  }
  bool is_bound() const { return backend_.device() != nullptr && backend_.device()->is_bound(); }
  const c10::Stream& home() const { return backend_.device()->main_stream(); }

  const SessionBackend& backend_;
  std::vector<Chunk> chunks_;
  int64_t next_ = 0, pinned_ = 0, copies_ = 0;
  Places free_;
};

}  // namespace dtrrun

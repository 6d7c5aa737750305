// Reads of one piece of a file, with O_DIRECT or through the page cache.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

namespace files {

constexpr int64_t BLOCK = 4096, BOUNCE_BYTES = (4 << 20) + 2 * BLOCK;
enum : int32_t { TRUNCATED = -1, CHANGED = -2, CLOSED = -3, CANCELLED = -4 };  // beside errno's

struct Piece {  // one request
  int64_t fd, direct;        // the file; the same opened with O_DIRECT, or -1
  int64_t offset, bytes;
  int64_t size, changed_ns;  // of the file when it was opened; size -1: not checked
  int64_t count;             // number of views, which follow: address and size each
  const iovec* views() const { return reinterpret_cast<const iovec*>(this + 1); }
  const Piece* next() const { return reinterpret_cast<const Piece*>(views() + count); }
};

struct Job {  // made by streaming.py, which keeps it and its pieces until it is done
  const Piece* piece;            // the first that no thread has taken
  int64_t waiting, taken;        // numbers of pieces from there on, and before
  int64_t failed;                // index of the piece that failed
  int32_t urgent, reading, error, refused;  // refused: opened with O_DIRECT, but not read
  std::atomic<int32_t> done;
};

static inline int64_t round_up(int64_t offset) { return (offset + BLOCK - 1) / BLOCK * BLOCK; }

// Sets `rest` to the views without their first `done` bytes; true: they are aligned to blocks.
static inline bool remaining(const Piece& piece, int64_t done, std::vector<iovec>& rest) {
  rest.clear();
  bool aligned = (piece.offset + done) % BLOCK == 0;
  for (int64_t i = 0; i < piece.count; ++i) {
    const int64_t size = piece.views()[i].iov_len, skipped = std::min(done, size);
    done -= skipped;
    if (skipped == size) continue;
    char* place = static_cast<char*>(piece.views()[i].iov_base) + skipped;
    rest.push_back({place, size_t(size - skipped)});
    aligned &= reinterpret_cast<uintptr_t>(place) % BLOCK == 0 && (size - skipped) % BLOCK == 0;
  }
  return aligned;
}

// Reads some of the bytes after the first `done`, through `bounce` where they are not aligned.
static inline int64_t read_some(const Piece& piece, int64_t done, std::vector<iovec>& rest,
                                char* bounce) {
  const bool aligned = remaining(piece, done, rest);
  if (!bounce) return preadv(piece.fd, rest.data(), rest.size(), piece.offset + done);
  if (aligned) return preadv(piece.direct, rest.data(), rest.size(), piece.offset + done);
  const int64_t at = piece.offset + done, start = at / BLOCK * BLOCK;
  const int64_t end = std::min(start + BOUNCE_BYTES, round_up(piece.offset + piece.bytes));
  int64_t got = pread(piece.direct, bounce, end - start, start);
  if (got < 0) return got;
  const char* from = bounce + (at - start);
  got = std::max<int64_t>(got - (at - start), 0);
  int64_t left = std::min(got, piece.bytes - done);
  const int64_t copied = left;
  for (const iovec& view : rest) {
    const int64_t part = std::min<int64_t>(left, view.iov_len);
    memcpy(view.iov_base, from, part);
    from += part;
    left -= part;
  }
  return copied;
}

// Reads a piece; 0, an errno, or `TRUNCATED`. Without `bounce` it reads through the page cache, and
// drops the pages at once.
static inline int32_t read_all(const Piece& piece, std::vector<iovec>& rest, char* bounce) {
  int64_t done = 0;
  while (done < piece.bytes) {
    const int64_t got = read_some(piece, done, rest, bounce);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) break;
    done += got;
  }
  if (!bounce) {
    const int64_t start = piece.offset / BLOCK * BLOCK;
    posix_fadvise(piece.fd, start, round_up(piece.offset + done) - start, POSIX_FADV_DONTNEED);
  }
  return done < piece.bytes ? TRUNCATED : 0;
}

static inline bool is_changed(const Piece& piece) {
  struct stat now;
  if (piece.size < 0 || fstat(piece.fd, &now)) return false;
  return now.st_size != piece.size ||
         now.st_mtim.tv_sec * 1'000'000'000 + now.st_mtim.tv_nsec != piece.changed_ns;
}

}  // namespace files

// Waits up to `seconds`; true: the job is done.
extern "C" int32_t moe_read_wait(void* reader, void* job, double seconds);

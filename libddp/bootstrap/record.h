#pragma once

// The one form of what ranks tell each other as text before they trust each other: entries of the
// store, and the request on a Unix socket.
//
//   libddp-peer-2 0.1.0 1:3 5:alpha 0:
//
// Format name, libddp version, then the fields in order, each with its length in bytes in front: a
// field may hold anything, and nothing has to be escaped. A reader takes exactly what a writer
// gives; anything else is a StoreError that shows what was found, printable, and for another
// version of the format both formats and both versions.
// Thread rule: values; one thread each.
//
//   constexpr RecordForm kForm{"libddp-peer-2", "the store holds no description of a rank"};
//   std::string text = RecordWriter(kForm).integer(3).field("alpha").text();
//
//   RecordReader fields(kForm, text);
//   info.rank = fields.integer(0);
//   info.host = fields.field();
//   fields.end();

#include <cstddef>
#include <limits>
#include <string>
#include <string_view>

namespace libddp {

struct RecordForm {
  /// "libddp-<what>-<number>"; the number changes with the fields.
  std::string_view format;
  /// What is wrong if a text is not of this form: "the store holds no description of a rank".
  std::string_view complaint;
};

class RecordWriter {
 public:
  explicit RecordWriter(const RecordForm& form);
  /// As another version writes it; for the reader's messages.
  RecordWriter(const RecordForm& form, std::string_view version);

  RecordWriter& field(std::string_view bytes);
  RecordWriter& integer(int number);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

/// Throws StoreError from every function if the text is not of the form. Takes no memory that the
/// text itself does not have.
class RecordReader {
 public:
  /// `text` must live as long; more than kMaxValueBytes are of no form.
  RecordReader(const RecordForm& form, const std::string& text);

  /// The version of libddp that wrote it, as it was written.
  std::string version() const { return std::string(version_); }
  /// The next field, as it was written.
  std::string field();
  /// The next field, which is a number in [low, high] as integer() writes it.
  int integer(int low, int high = std::numeric_limits<int>::max());
  /// Nothing comes after the last field.
  void end() const;
  /// For a field that is not what it has to be.
  [[noreturn]] void refuse() const;

 private:
  const RecordForm& form_;
  const std::string_view text_;
  std::string_view rest_;
  std::string_view version_;
};

}  // namespace libddp

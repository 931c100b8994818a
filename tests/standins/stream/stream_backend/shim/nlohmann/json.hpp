// The little of nlohmann::json that torch's FlightRecorderDetail.hpp uses: torch's wheels come without that library.
#pragma once

#include <cstdint>
#include <cstdio>
#include <list>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace nlohmann {

class json {
 public:
  json() = default;
  template <typename T>
  json(const T& v) : text_(encode(v)) {}
  template <typename T>
  json& operator=(const T& v) {
    text_ = encode(v);
    return *this;
  }
  json(const json&) = default;
  json& operator=(const json&) = default;
  json& operator[](const std::string& key) {
    return members_[key];
  }
  std::string dump() const {
    return members_.empty() ? (text_.empty() ? "{}" : text_) : encode(members_);
  }

 private:
  static std::string encode(const json& j) {
    return j.dump();
  }
  static std::string encode(bool v) {
    return v ? "true" : "false";
  }
  static std::string encode(const char* v) {
    return encode(std::string(v));
  }
  static std::string encode(const std::string& v) {
    std::string out = "\"";
    for (const unsigned char c : v) {
      char escaped[8];
      if (c == '"' || c == '\\') {
        out += '\\';
        out += static_cast<char>(c);
      } else if (c < 0x20) {
        snprintf(escaped, sizeof escaped, "\\u%04x", c);
        out += escaped;
      } else {
        out += static_cast<char>(c);
      }
    }
    return out + "\"";
  }
  template <typename T>
  static std::enable_if_t<std::is_arithmetic_v<T>, std::string> encode(T v) {
    if constexpr (std::is_floating_point_v<T>) {
      char text[40];
      snprintf(text, sizeof text, "%.9g", static_cast<double>(v));
      return text;
    } else {
      return std::to_string(v);
    }
  }
  static std::string encode(const std::tuple<std::string, std::string>& v) {
    return "[" + encode(std::get<0>(v)) + "," + encode(std::get<1>(v)) + "]";
  }
  template <typename T>
  static std::string sequence(const T& items) {
    std::string out = "[";
    for (const auto& i : items)
      out += (out.size() > 1 ? "," : "") + encode(i);
    return out + "]";
  }
  template <typename T>
  static std::string object(const T& items) {
    std::string out = "{";
    for (const auto& [k, v] : items)
      out += (out.size() > 1 ? "," : "") + encode(std::string(k)) + ":" + encode(v);
    return out + "}";
  }
  template <typename T>
  static std::string encode(const std::list<T>& v) {
    return sequence(v);
  }
  template <typename T>
  static std::string encode(const std::vector<T>& v) {
    return sequence(v);
  }
  template <typename T>
  static std::string encode(const std::map<std::string, T>& v) {
    return object(v);
  }
  template <typename T>
  static std::string encode(const std::unordered_map<std::string, T>& v) {
    return object(v);
  }

  std::string text_;
  std::map<std::string, json> members_;
};

}  // namespace nlohmann

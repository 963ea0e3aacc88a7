// What of {fmt} is no template, compiled once for all sources of this project: in every one of them it would take six
// seconds. Programs that link tersor go on with the header-only form. LibTorch brings headers of {fmt}, but not this source.
#include <fmt/format-inl.h>

FMT_BEGIN_NAMESPACE
namespace detail {
template FMT_API auto thousands_sep_impl<char>(locale_ref) -> thousands_sep_result<char>;
template FMT_API auto decimal_point_impl<char>(locale_ref) -> char;
}  // namespace detail
FMT_END_NAMESPACE

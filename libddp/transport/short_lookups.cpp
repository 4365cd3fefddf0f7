#include "libddp/transport/short_lookups.h"

#include <resolv.h>

namespace libddp {

void shorten_lookups() {
#ifdef __GLIBC__
  // _res is the thread's own.
  if (::res_init() != 0) return;
  _res.retrans = 1;
  _res.retry = 1;
#endif
}

}  // namespace libddp

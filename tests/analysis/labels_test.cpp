#include "tersor/analysis/labels.hpp"

#include "catch.hpp"

using tersor::Label;
using tersor::Labels;
using tersor::LabelVector;

TEST_CASE("labels: united labels are one, others are not") {
  Labels labels;
  const LabelVector x = labels.fresh(4);
  labels.unite(x[0], x[2]);
  labels.unite(x[2], x[3]);
  CHECK(labels.find(x[0]) == labels.find(x[3]));
  CHECK(labels.find(x[0]) != labels.find(x[1]));
}

TEST_CASE("labels: what is fixed fixes its class, whichever came first") {
  Labels labels;
  const LabelVector x = labels.fresh(5);
  labels.unite(x[0], x[1]);
  labels.fix(x[0], labels.reason("an output"));
  labels.unite(x[2], x[1]);
  CHECK(labels.fixed(x[1]));
  CHECK(labels.fixed(x[2]));
  CHECK(labels.why_fixed(x[2]) == "an output");
  CHECK_FALSE(labels.fixed(x[3]));
  labels.unite(x[3], Labels::pinned);
  CHECK(labels.fixed(x[3]));
  CHECK(labels.why_fixed(x[4]).empty());
}

TEST_CASE("labels: a composite stands for its parts, and equal composites are united part by part") {
  Labels labels;
  const LabelVector x = labels.fresh(2), head = labels.fresh(2), size = labels.fresh(2);
  labels.substitute(x[0], {head[0], size[1]});
  labels.substitute(x[1], {head[1], size[0]});
  CHECK(labels.atoms(x[0]) == LabelVector{head[0], size[1]});

  labels.unite(x[0], x[1]);
  CHECK(labels.find(head[0]) == labels.find(head[1]));
  CHECK(labels.find(size[0]) == labels.find(size[1]));
  CHECK(labels.find(head[0]) != labels.find(size[0]));
}

TEST_CASE("labels: an atom united with a composite becomes it; fixing reaches every part") {
  Labels labels;
  const LabelVector x = labels.fresh(3), parts = labels.fresh(2);
  labels.substitute(x[0], parts);
  labels.unite(x[1], x[0]);
  CHECK(labels.atoms(x[1]) == parts);
  labels.fix(x[1], labels.reason("here"));
  CHECK(labels.fixed(parts[0]));
  CHECK(labels.fixed(parts[1]));
  CHECK_FALSE(labels.fixed(x[2]));
}

TEST_CASE("labels: a label united with a composite that contains it melts the composite") {
  Labels labels;
  const LabelVector x = labels.fresh(1), parts = labels.fresh(3);
  labels.substitute(x[0], {parts[0], parts[1]});
  labels.unite(parts[0], x[0]);
  CHECK(labels.find(parts[0]) == labels.find(parts[1]));
  CHECK(labels.find(parts[0]) != labels.find(parts[2]));
  labels.substitute(parts[2], {parts[2], parts[1]});
  CHECK(labels.find(parts[2]) == labels.find(parts[1]));
}

TEST_CASE("labels: composites of unequal length become one atom") {
  Labels labels;
  const LabelVector x = labels.fresh(2), parts = labels.fresh(5);
  labels.substitute(x[0], {parts[0], parts[1]});
  labels.substitute(x[1], {parts[2], parts[3], parts[4]});
  labels.unite(x[0], x[1]);
  for (const Label part : parts) CHECK(labels.find(part) == labels.find(parts[0]));
}

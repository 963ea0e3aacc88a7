#include <algorithm>
#include <set>

#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/function_impl.h>

#include "script.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/runtime/packed.hpp"

namespace tersor {
namespace {

/// Copies tensors and what holds them; a tensor that is reached twice is copied once. Two tensors that cover the same
/// memory in the same way (a shared weight after it was loaded) become one.
class Values {
 public:
  explicit Values(bool copy) : copy_(copy) {}

  c10::IValue operator()(const c10::IValue& value) {
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isList()) {
      const c10::List<c10::IValue> from = value.toList();
      c10::List<c10::IValue> to(from.elementType());
      for (const c10::IValue& item : from) to.push_back((*this)(item));
      return to;
    }
    if (value.isTuple()) {
      std::vector<c10::IValue> items;
      for (const c10::IValue& item : value.toTupleRef().elements()) items.push_back((*this)(item));
      const auto type = value.type()->expect<c10::TupleType>();
      return type->schema() ? c10::ivalue::Tuple::createNamed(std::move(items), type)
                            : c10::ivalue::Tuple::create(std::move(items));
    }
    if (value.isGenericDict()) {
      const c10::Dict<c10::IValue, c10::IValue> from = value.toGenericDict();
      c10::Dict<c10::IValue, c10::IValue> to(from.keyType(), from.valueType());
      for (const auto& item : from) to.insert(item.key(), (*this)(item.value()));
      return to;
    }
    return value;
  }

 private:
  using Key =
      std::tuple<const void*, std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>, at::ScalarType>;

  at::Tensor tensor(const at::Tensor& from) {
    if (!from.defined()) return from;
    if (from.layout() != at::kStrided || !from.has_storage()) return copy_ ? from.clone() : from;
    const Key key{from.storage().unsafeGetStorageImpl(), from.storage_offset(), from.sizes().vec(),
                  from.strides().vec(), from.scalar_type()};
    auto [entry, fresh] = seen_.try_emplace(key);
    if (fresh) {
      entry->second = copy_ ? from.detach().clone() : from;
      if (copy_ && from.requires_grad()) entry->second.set_requires_grad(true);
    }
    return entry->second;
  }

  bool copy_;
  std::map<Key, at::Tensor> seen_;
};

/// The name of a class without the marks that keep equal names apart, which depend on what was loaded before.
c10::QualifiedName plain_name(const c10::ClassType& type) {
  std::vector<std::string> atoms;
  for (const std::string& atom : type.name()->atoms())
    if (!atom.starts_with("___torch_mangle_")) atoms.push_back(atom);
  return c10::QualifiedName(atoms);
}

bool is_module(const c10::TypePtr& type) {
  const auto cls = type->cast<c10::ClassType>();
  return cls && cls->is_module();
}

class TreeCopy {
 public:
  TreeCopy(std::shared_ptr<jit::CompilationUnit> unit, bool copy_values)
      : unit_(std::move(unit)), values_(copy_values) {}

  jit::ModulePtr operator()(const jit::ModulePtr& from) {
    if (const auto done = objects_.find(from.get()); done != objects_.end()) return done->second;
    const c10::ClassTypePtr type = from->type();
    c10::QualifiedName name = plain_name(*type);
    if (unit_->get_type(name)) name = unit_->mangle(name);
    const c10::ClassTypePtr own = c10::ClassType::create(name, unit_, /*is_module=*/true);
    unit_->register_type(own);
    const jit::ModulePtr to = c10::ivalue::Object::create(c10::StrongTypePtr(unit_, own), type->numAttributes());
    objects_[from.get()] = to;
    for (std::size_t i = 0; i < type->numConstants(); ++i)
      own->addConstant(type->getConstantName(i), type->getConstant(i));
    for (std::size_t i = 0; i < type->numAttributes(); ++i) {
      const c10::TypePtr& attribute = type->getAttribute(i);
      check(attribute->kind() != c10::TypeKind::InterfaceType, ErrorCode::UnsupportedModel,
            "submodule '{}' is reached through an interface; tersor needs submodules of a known class",
            escaped(type->getAttributeName(i)));
      if (is_module(attribute)) {
        const jit::ModulePtr child = (*this)(from->getSlot(i).toObject());
        own->addAttribute(type->getAttributeName(i), child->type());
        to->setSlot(i, child);
      } else {
        own->addAttribute(type->getAttributeName(i), attribute, type->is_parameter(i), type->is_buffer(i));
        to->setSlot(i, values_(from->getSlot(i)));
      }
    }
    return to;
  }

 private:
  std::shared_ptr<jit::CompilationUnit> unit_;
  Values values_;
  std::unordered_map<const c10::ivalue::Object*, jit::ModulePtr> objects_;
};

/// Gives every attribute read the type that the tree holds now.
void retype(jit::Block* block) {
  for (jit::Node* node : block->nodes()) {
    if (node->kind() == c10::prim::GetAttr) {
      const auto type = node->input()->type()->cast<c10::ClassType>();
      if (type && type->is_module()) node->output()->setType(type->getAttribute(node->s(c10::attr::name)));
    } else {
      for (const jit::Value* output : node->outputs())
        check(!is_module(output->type()), ErrorCode::UnsupportedModel,
              "forward passes submodules around as values ({}); tersor follows only submodules that are read as "
              "attributes",
              node->kind().toQualString());
    }
    for (jit::Block* inner : node->blocks()) retype(inner);
  }
}

void visit(const jit::ModulePtr& object, const std::string& prefix, std::set<const c10::ivalue::Object*>& seen,
           const std::function<void(const std::string&, const c10::IValue&)>& see) {
  if (!seen.insert(object.get()).second) return;
  const c10::ClassTypePtr type = object->type();
  for (std::size_t i = 0; i < type->numAttributes(); ++i) {
    const std::string name = prefix + type->getAttributeName(i);
    if (is_module(type->getAttribute(i))) {
      visit(object->getSlot(i).toObject(), name + ".", seen, see);
    } else {
      see(name, object->getSlot(i));
    }
  }
}

void visit(const jit::Module& root, const std::function<void(const std::string&, const c10::IValue&)>& see) {
  std::set<const c10::ivalue::Object*> seen;
  visit(root._ivalue(), "", seen, see);
}

constexpr std::string_view packed_suffix = "_packed";

}  // namespace

Script rebuild(const Script& script, bool copy_values) {
  const auto unit = std::make_shared<jit::CompilationUnit>();
  Script own;
  own.root = jit::Module(TreeCopy(unit, copy_values)(script.root._ivalue()));
  own.graph = script.graph->copy();
  own.graph->inputs().front()->setType(own.root.type());
  retype(own.graph->block());
  own.arguments = script.arguments;
  own.training = script.training;
  own.origin = script.origin;
  return own;
}

jit::Module assemble(const Script& script) {
  const Script own = rebuild(script, false);
  const c10::ClassTypePtr type = own.root.type();
  jit::Function* forward =
      own.root._ivalue()->compilation_unit()->create_function(c10::QualifiedName(*type->name(), "forward"), own.graph);
  std::vector<c10::Argument> arguments{c10::Argument("self", type)};
  arguments.insert(arguments.end(), own.arguments.begin(), own.arguments.end());
  std::vector<c10::Argument> returns;
  for (const jit::Value* output : own.graph->outputs()) returns.emplace_back("", output->type());
  forward->setSchema(c10::FunctionSchema("forward", "", std::move(arguments), std::move(returns)));
  type->addMethod(forward);
  return own.root;
}

std::vector<NamedTensor> named_tensors(const jit::Module& root) {
  std::vector<NamedTensor> tensors;
  visit(root, [&](const std::string& name, const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) tensors.push_back({name, value.toTensor()});
  });
  return tensors;
}

std::string bias_beside(const std::string& weight) {
  const std::size_t place = weight.rfind("weight");
  if (place == std::string::npos || place + 6 != weight.size()) return weight + "_bias";
  return weight.substr(0, place) + "bias";
}

std::optional<PackedWeight> as_packed(const std::string& attribute, const c10::IValue& value) {
  if (!value.isObject() && !value.isCapsule()) return std::nullopt;
  if (!attribute.ends_with(packed_suffix)) return std::nullopt;
  PackedWeight found;
  found.weight = attribute.substr(0, attribute.size() - packed_suffix.size());
  found.packed = value;
  const auto type = value.type()->cast<c10::ClassType>();
  if (!type || !type->name()) return std::nullopt;
  const std::string name = type->name()->qualifiedName();
  if (name == "__torch__.torch.classes.tersor.PackedLinear") {
    const auto packed = value.toCustomClass<PackedLinear>();
    found.quantization = {packed->weight(), packed->activation()};
    found.bias_values = packed->bias();
  } else if (name == "__torch__.torch.classes.tersor.PackedConv") {
    const auto packed = value.toCustomClass<PackedConv>();
    found.quantization = {packed->weight(), {}};
    found.bias_values = packed->bias();
  } else if (name == "__torch__.torch.classes.tersor.PackedEmbedding") {
    found.quantization = {value.toCustomClass<PackedEmbedding>()->weight(), {}};
  } else {
    return std::nullopt;
  }
  if (found.bias_values) {
    const std::size_t dot = found.weight.rfind('.');
    const std::size_t own = dot == std::string::npos ? 0 : dot + 1;
    found.bias = found.weight.substr(0, own) + bias_beside(found.weight.substr(own));
  }
  return found;
}

std::vector<PackedWeight> packed_weights(const jit::Module& root) {
  std::vector<PackedWeight> packed;
  visit(root, [&](const std::string& name, const c10::IValue& value) {
    if (auto found = as_packed(name, value)) packed.push_back(std::move(*found));
  });
  return packed;
}

std::optional<std::string> attribute_path(const jit::Value* value) {
  std::string path;
  while (value->node()->kind() == c10::prim::GetAttr) {
    const std::string& name = value->node()->s(c10::attr::name);
    path = path.empty() ? name : name + "." + path;
    value = value->node()->input();
  }
  const bool from_self = value == value->owningGraph()->inputs().front();
  return from_self && !path.empty() ? std::optional(path) : std::nullopt;
}

std::pair<jit::Module, std::string> owner_of(const jit::Module& root, std::string_view path) {
  jit::Module module = root;
  for (std::size_t dot = path.find('.'); dot != std::string_view::npos; dot = path.find('.')) {
    module = jit::Module(module.attr(std::string(path.substr(0, dot))).toObject());
    path.remove_prefix(dot + 1);
  }
  return {module, std::string(path)};
}

std::optional<c10::IValue> find_attribute(const jit::Module& root, std::string_view path) {
  jit::ModulePtr object = root._ivalue();
  while (true) {
    const std::size_t dot = path.find('.');
    const auto slot = object->type()->findAttributeSlot(std::string(path.substr(0, dot)));
    if (!slot) return std::nullopt;
    const c10::IValue value = object->getSlot(*slot);
    if (dot == std::string_view::npos) return value;
    if (!is_module(object->type()->getAttribute(*slot))) return std::nullopt;
    object = value.toObject();
    path.remove_prefix(dot + 1);
  }
}

c10::IValue attribute_at(const jit::Module& root, std::string_view path) {
  const auto [module, name] = owner_of(root, path);
  return module.attr(name);
}

}  // namespace tersor

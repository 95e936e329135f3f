//! Who imports whom: what the paths of a crate's modules stand for, and the circles in that. Whoever takes a name from
//! a module imports its file, also if that only passes the name on: then what it has it from, too.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::source::Source;

/// By whom, whom, and one path that does it.
pub type Graph = BTreeMap<String, BTreeMap<String, String>>;

/// The files of a crate.
pub fn files(source: &Source) -> Graph {
    let name = |file: usize| source.files[file].display().to_string();
    imports(source, |module| Some(name(source.modules[module].file)))
}

/// Its rooms: each module of the root with all below it. The root is none.
pub fn rooms(source: &Source) -> Graph {
    imports(source, |module| source.modules[module].path.first().cloned())
}

/// Modules by what `node` puts them together to.
fn imports(source: &Source, node: impl Fn(usize) -> Option<String>) -> Graph {
    let mut graph = Graph::new();
    for me in 0..source.modules.len() {
        let Some(from) = node(me) else { continue };
        let targets = graph.entry(from.clone()).or_default();
        for (module, by) in imports_of(source, me) {
            match node(module) {
                Some(to) if to != from => targets.entry(to).or_insert(by),
                _ => continue,
            };
        }
    }
    graph
}

/// Modules that one module imports, each with a path.
fn imports_of(source: &Source, me: usize) -> Vec<(usize, String)> {
    let module = &source.modules[me];
    let mut found = Vec::new();
    let names = module.imports.iter().map(|(_, name)| name);
    for name in names.chain(&module.globs).chain(&module.mentions) {
        let mut modules = BTreeSet::new();
        follow(source, me, name, &mut Vec::new(), &mut modules);
        found.extend(modules.into_iter().map(|m| (m, name.join("::"))));
    }
    for call in &module.calls {
        // By the order of the text: a macro that is defined in front of `mod` holds in that.
        let mut here = Some(me);
        while let Some(at) = here {
            if source.modules[at].macros.contains(call) {
                found.push((at, format!("{call}!")));
                break;
            }
            here = source.modules[at].parent;
        }
    }
    found
}

/// The modules that `name` is looked up in from the module `at`, or the one that it is. None if it begins outside of
/// the crate.
fn follow(source: &Source, at: usize, name: &[String], seen: &mut Vec<(usize, String)>, found: &mut BTreeSet<usize>) {
    let Some((mut here, rest)) = begin(source, at, name) else {
        return;
    };
    for (i, word) in rest.iter().enumerate() {
        let module = &source.modules[here];
        if let Some(child) = module.children.get(word) {
            here = *child;
            continue;
        }
        found.insert(here);
        // Perhaps it is here by a `use`; by itself it is not, as in `use library::library`.
        if seen.iter().any(|(m, w)| *m == here && w == word) {
            return;
        }
        seen.push((here, word.clone()));
        for (alias, target) in &module.imports {
            if alias == word {
                let target = [&target[..], &rest[i + 1..]].concat();
                follow(source, here, &target, seen, found);
            }
        }
        for glob in &module.globs {
            let from = begin(source, here, glob).and_then(|(m, rest)| descend(source, m, rest));
            let has = |m: &usize| {
                let module = &source.modules[*m];
                module.children.contains_key(word) || module.imports.iter().any(|(a, _)| a == word)
            };
            if let Some(from) = from.filter(has) {
                let target = [&["self".to_owned()], &rest[i..]].concat();
                follow(source, from, &target, seen, found);
            }
        }
        return;
    }
    found.insert(here);
}

/// Where a path begins, and what is left of it.
fn begin<'a>(source: &Source, at: usize, name: &'a [String]) -> Option<(usize, &'a [String])> {
    let mut here = at;
    let mut rest = name;
    while let Some((word, more)) = rest.split_first() {
        match word.as_str() {
            "crate" => here = 0,
            "self" => {}
            "super" => here = source.modules[here].parent?,
            _ => break,
        }
        rest = more;
    }
    Some((here, rest))
}

/// The module that a path of modules leads to.
fn descend(source: &Source, at: usize, names: &[String]) -> Option<usize> {
    names
        .iter()
        .try_fold(at, |here, word| source.modules[here].children.get(word).copied())
}

/// All that can be reached from `from`, each with whom it was reached by.
fn reach<'a>(graph: &'a Graph, from: &str) -> BTreeMap<&'a str, &'a str> {
    let mut before = BTreeMap::new();
    let mut next: VecDeque<&str> = graph.get_key_value(from).map(|(k, _)| k.as_str()).into_iter().collect();
    while let Some(node) = next.pop_front() {
        for to in graph.get(node).into_iter().flat_map(BTreeMap::keys) {
            if !before.contains_key(to.as_str()) {
                before.insert(to.as_str(), node);
                next.push_back(to);
            }
        }
    }
    before
}

/// Those that import each other, directly or through each other, more than one; the largest first.
pub fn circles(graph: &Graph) -> Vec<Vec<String>> {
    let reached: BTreeMap<&str, _> = graph.keys().map(|node| (node.as_str(), reach(graph, node))).collect();
    let mut circles: Vec<Vec<String>> = Vec::new();
    for (node, from_here) in &reached {
        let is_new = !circles.iter().flatten().any(|n| n == node);
        if is_new && from_here.contains_key(node) {
            let back = |n: &&str| reached.get(n).is_some_and(|r| r.contains_key(node));
            let members = from_here.keys().copied().filter(back);
            circles.push(members.map(str::to_owned).collect());
        }
    }
    circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    circles
}

/// A shortest way around in a circle, in order, with the paths that make it.
pub fn way_around(graph: &Graph, circle: &[String]) -> String {
    let ways = circle.iter().map(|start| way_back(graph, start));
    let way = ways.min_by_key(Vec::len).unwrap_or_default();
    let steps = way.iter().zip(way.iter().cycle().skip(1));
    steps
        .map(|(from, to)| format!("  {from} imports {to} ({})\n", graph[*from][*to]))
        .collect()
}

/// From `start` on, to the one that imports it.
fn way_back<'a>(graph: &'a Graph, start: &'a str) -> Vec<&'a str> {
    let before = reach(graph, start);
    let mut way = Vec::new();
    let mut at = before.get(start).copied();
    while let Some(node) = at.filter(|node| *node != start) {
        way.push(node);
        at = before.get(node).copied();
    }
    way.push(start);
    way.reverse();
    way
}

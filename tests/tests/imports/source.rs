//! The modules of a crate as its source declares them: which file each is in, what it imports, and which paths it
//! names. Only tokens are looked at, so what stands in the arguments of a macro counts like other code. What only tests
//! compile is left out, and so are comments and visibilities, which import nothing. Not what a path stands for
//! (`graph.rs`).

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A path as it is written: `crate::a::B` is three names.
pub type Name = Vec<String>;

/// One module, inline or a file.
#[derive(Debug, Default)]
pub struct Module {
    /// Its names from the root on, which has none.
    pub path: Name,
    pub parent: Option<usize>,
    /// Which of the crate's files it is in.
    pub file: usize,
    pub children: HashMap<String, usize>,
    /// What a `use` in it, or in a function of it, gives a name to.
    pub imports: Vec<(String, Name)>,
    /// What a `use` takes all of.
    pub globs: Vec<Name>,
    /// Paths of more than one name, wherever they stand.
    pub mentions: Vec<Name>,
    /// Macros that it defines by `macro_rules!`, and macros that it calls by their bare names.
    pub macros: HashSet<String>,
    pub calls: HashSet<String>,
}

/// A crate's own source.
#[derive(Debug, Default)]
pub struct Source {
    pub files: Vec<PathBuf>,
    /// The first is the root.
    pub modules: Vec<Module>,
}

/// How a file is read.
pub type Read<'a> = &'a dyn Fn(&Path) -> Option<String>;

impl Source {
    /// The crate whose root is the file `root`, with all files that it declares.
    pub fn read(root: &Path, read: Read<'_>) -> Self {
        let mut source = Self::default();
        let dir = root.parent().unwrap_or(Path::new("")).to_owned();
        source.file(root.to_owned(), dir, Module::default(), read);
        source
    }

    /// Adds the module that is all of the file at `at`, whose children's files are in `dir`.
    fn file(&mut self, at: PathBuf, dir: PathBuf, mut module: Module, read: Read<'_>) {
        let text = read(&at).unwrap_or_else(|| panic!("{} cannot be read", at.display()));
        let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{}: {error}", at.display()));
        self.files.push(at);
        module.file = self.files.len() - 1;
        self.modules.push(module);
        let me = self.modules.len() - 1;
        self.walk(me, tokens, &dir, read);
    }

    fn walk(&mut self, me: usize, tokens: TokenStream, dir: &Path, read: Read<'_>) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let tokens = tokens.as_slice();
        let mut at = 0;
        // By the attributes in front of a module.
        let mut place = None;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token {
                TokenTree::Punct(p) if p.as_char() == '#' => {
                    at += usize::from(is_punct(tokens.get(at), '!'));
                    let Some(attribute) = group(tokens.get(at), Delimiter::Bracket) else {
                        continue;
                    };
                    at += 1;
                    match Attribute::of(attribute) {
                        Attribute::Test => at += length_of_item(&tokens[at..]),
                        Attribute::Path(path) => place = Some(path),
                        Attribute::Silent => {}
                        Attribute::Other(inner) => self.walk(me, inner, dir, read),
                    }
                }
                // A path that begins outside of the crate, or behind a type.
                TokenTree::Punct(p) if p.as_char() == ':' && is_punct(tokens.get(at), ':') => {
                    at += 1;
                    at += path(&tokens[at..]).1;
                }
                // A field or a method.
                TokenTree::Punct(p) if p.as_char() == '.' => {
                    at += usize::from(ident(tokens.get(at)).is_some());
                }
                TokenTree::Ident(word) => {
                    at += match word.to_string().as_str() {
                        "mod" if ident(tokens.get(at)).is_some() => {
                            self.declare(me, &tokens[at..], place.take(), dir, read)
                        }
                        "use" if !is_punct(tokens.get(at), '<') => self.import(me, &tokens[at..]),
                        "pub" => usize::from(is_visibility(tokens.get(at))),
                        _ => self.mention(me, &tokens[at - 1..]) - 1,
                    };
                }
                TokenTree::Group(inner) => self.walk(me, inner.stream(), dir, read),
                _ => {}
            }
        }
    }

    /// `mod name;` or `mod name { … }`, from the name on: how many tokens that are.
    fn declare(&mut self, me: usize, rest: &[TokenTree], place: Option<String>, dir: &Path, read: Read<'_>) -> usize {
        let name = ident(rest.first()).unwrap_or_default();
        let path = [&self.modules[me].path[..], std::slice::from_ref(&name)].concat();
        let child = Module {
            path,
            parent: Some(me),
            file: self.modules[me].file,
            ..Module::default()
        };
        let at = self.modules.len();
        self.modules[me].children.insert(name.clone(), at);
        let inner = dir.join(&name);
        if let Some(body) = group(rest.get(1), Delimiter::Brace) {
            self.modules.push(child);
            self.walk(at, body, &inner, read);
            return 2;
        }
        if let Some(place) = place {
            let file = &self.files[self.modules[me].file];
            let at = file.parent().unwrap_or(Path::new("")).join(place);
            let inner = at.parent().unwrap_or(Path::new("")).to_owned();
            self.file(at, inner, child, read);
            return 1;
        }
        let nested = inner.join("mod.rs");
        let at = if read(&nested).is_some() {
            nested
        } else {
            inner.with_extension("rs")
        };
        self.file(at, inner, child, read);
        1
    }

    /// What a `use` brings, from its tree on.
    fn import(&mut self, me: usize, rest: &[TokenTree]) -> usize {
        let end = rest.iter().position(|t| is_punct(Some(t), ';'));
        let end = end.unwrap_or(rest.len());
        self.import_tree(me, &[], &rest[..end]);
        end
    }

    fn import_tree(&mut self, me: usize, prefix: &[String], tree: &[TokenTree]) {
        for branch in tree.split(|t| is_punct(Some(t), ',')) {
            let (names, length) = path(branch);
            let mut name = [prefix, &names[..]].concat();
            // Behind the names there may be a `::` in front of what is no name.
            let rest = &branch[length..];
            let rest = if is_punct(rest.first(), ':') {
                rest.get(2..).unwrap_or_default()
            } else {
                rest
            };
            if let Some(inner) = group(rest.first(), Delimiter::Brace) {
                let inner: Vec<_> = inner.into_iter().collect();
                self.import_tree(me, &name, &inner);
            } else if is_punct(rest.first(), '*') {
                self.modules[me].globs.push(name);
            } else if !names.is_empty() {
                if name.len() > 1 && name.last().is_some_and(|n| n == "self") {
                    name.pop();
                }
                let alias = ident(rest.get(1)).or_else(|| name.last().cloned());
                let alias = alias.unwrap_or_default();
                self.modules[me].imports.push((alias, name));
            }
        }
    }

    /// A path, or the name of a macro: how many tokens that are.
    fn mention(&mut self, me: usize, rest: &[TokenTree]) -> usize {
        let (names, length) = path(rest);
        let module = &mut self.modules[me];
        match names.as_slice() {
            [word] if word == "macro_rules" && is_punct(rest.get(1), '!') => {
                module.macros.extend(ident(rest.get(2)));
                return 3;
            }
            [word] if is_punct(rest.get(1), '!') && !is_punct(rest.get(2), '=') => {
                module.calls.insert(word.clone());
            }
            [_] | [] => {}
            _ => module.mentions.push(names),
        }
        length.max(1)
    }
}

/// What an attribute is to us.
enum Attribute {
    /// Its item is for tests alone.
    Test,
    /// Where a module's file is.
    Path(String),
    /// It cannot name anything.
    Silent,
    /// Its tokens.
    Other(TokenStream),
}

impl Attribute {
    fn of(tokens: TokenStream) -> Self {
        let all: Vec<TokenTree> = tokens.clone().into_iter().collect();
        match ident(all.first()).unwrap_or_default().as_str() {
            "cfg" => match group(all.get(1), Delimiter::Parenthesis) {
                Some(condition) if needs_test(condition.clone()) => Self::Test,
                _ => Self::Silent,
            },
            "path" => match all.last() {
                Some(place) => Self::Path(place.to_string().trim_matches('"').to_owned()),
                None => Self::Silent,
            },
            "doc" | "derive" | "cfg_attr" => Self::Silent,
            _ => Self::Other(tokens),
        }
    }
}

/// Whether a condition holds only where tests are compiled.
fn needs_test(condition: TokenStream) -> bool {
    let tokens: Vec<TokenTree> = condition.into_iter().collect();
    let of = group(tokens.get(1), Delimiter::Parenthesis).unwrap_or_default();
    let of: Vec<TokenTree> = of.into_iter().collect();
    let mut parts = of
        .split(|t| is_punct(Some(t), ','))
        .filter(|part| !part.is_empty())
        .map(|part| needs_test(part.iter().cloned().collect()));
    match ident(tokens.first()).unwrap_or_default().as_str() {
        "test" => true,
        "all" => parts.any(|needs| needs),
        "any" => parts.all(|needs| needs),
        _ => false,
    }
}

/// How many tokens belong to the item, the field or the statement that they begin with.
fn length_of_item(tokens: &[TokenTree]) -> usize {
    let mut at = 0;
    while is_punct(tokens.get(at), '#') {
        at += 2;
    }
    if ident(tokens.get(at)).is_some_and(|word| word == "pub") {
        at += 1 + usize::from(is_visibility(tokens.get(at + 1)));
    }
    let first = ident(tokens.get(at)).unwrap_or_default();
    let is_import = first == "use";
    // In the others a comma may be one of generics.
    let ends_by_comma = !matches!(
        first.as_str(),
        "fn" | "impl" | "trait" | "struct" | "enum" | "type" | "unsafe" | "async" | "extern"
    );
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(g) => g.delimiter() == Delimiter::Brace && !is_import,
        TokenTree::Punct(p) => p.as_char() == ';' || p.as_char() == ',' && ends_by_comma,
        _ => false,
    };
    let end = tokens[at..].iter().position(ends);
    end.map_or(tokens.len(), |end| at + end + 1)
}

/// The names at the beginning, with `::` between them, and how many tokens they are.
fn path(tokens: &[TokenTree]) -> (Name, usize) {
    let mut names = Vec::new();
    let mut at = 0;
    while let Some(name) = ident(tokens.get(at)) {
        names.push(name);
        at += 1;
        let goes_on = is_punct(tokens.get(at), ':') && is_punct(tokens.get(at + 1), ':');
        if !goes_on || ident(tokens.get(at + 2)).is_none() {
            break;
        }
        at += 2;
    }
    (names, at)
}

fn ident(token: Option<&TokenTree>) -> Option<String> {
    match token {
        Some(TokenTree::Ident(word)) => Some(word.to_string()),
        _ => None,
    }
}

fn is_punct(token: Option<&TokenTree>, c: char) -> bool {
    matches!(token, Some(TokenTree::Punct(p)) if p.as_char() == c)
}

fn group(token: Option<&TokenTree>, delimiter: Delimiter) -> Option<TokenStream> {
    match token {
        Some(TokenTree::Group(g)) if g.delimiter() == delimiter => Some(g.stream()),
        _ => None,
    }
}

/// What follows a `pub` says where, and is no type.
fn is_visibility(token: Option<&TokenTree>) -> bool {
    let Some(inner) = group(token, Delimiter::Parenthesis) else {
        return false;
    };
    let inner: Vec<TokenTree> = inner.into_iter().collect();
    match ident(inner.first()).unwrap_or_default().as_str() {
        "in" => true,
        "crate" | "super" | "self" => inner.len() == 1,
        _ => false,
    }
}

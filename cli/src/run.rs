//! `rdmasock run`: sets the environment and executes the program.
//!
//! The options are generated from the library's table of variables, and the library's parser checks their values. So
//! the command itself reports a wrong value. Otherwise the library would report it later on the program's stderr.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::builder::OsStringValueParser;
use clap::{Arg, ArgMatches, Args, FromArgMatches};
use rdmasock_shims::config::{Alloc, Config, VARIABLES};
use rustix::fs::{Access, access};

use crate::elf;

const LIBRARY: &str = "librdmasock.so";
const ALLOCATOR: &str = "librdmasock_alloc.so";
const LIBRARY_VARIABLE: &str = "RDMASOCK_LIBRARY";
const PRELOAD: &str = "LD_PRELOAD";
const PROGRAM: &str = "program";

/// For each sanitizer: its library, the variable with its options, and an option that is needed. Without that option a
/// program with this sanitizer does not start behind a preloaded library, or reports memory accesses of the preloaded
/// library.
const SANITIZERS: [(&str, &str, &str); 4] = [
    ("libasan.so", "ASAN_OPTIONS", "verify_asan_link_order=0"),
    ("libclang_rt.asan", "ASAN_OPTIONS", "verify_asan_link_order=0"),
    ("libtsan.so", "TSAN_OPTIONS", "ignore_noninstrumented_modules=1"),
    ("libclang_rt.tsan", "TSAN_OPTIONS", "ignore_noninstrumented_modules=1"),
];

/// Options of `rdmasock run`.
#[derive(Debug)]
pub(crate) struct Options {
    /// The library's variables that were given as options, with their values.
    variables: Vec<(&'static str, OsString)>,
    /// The program and its arguments.
    program: Vec<OsString>,
}

impl Args for Options {
    fn augment_args(command: clap::Command) -> clap::Command {
        let options = VARIABLES.iter().map(|variable| {
            Arg::new(variable.name)
                .long(&*variable.option().leak())
                .value_name("VALUE")
                .value_parser(OsStringValueParser::new())
                .help(format!(
                    "{}\n[{}; default: {}; accepted: {}]",
                    capitalised(variable.meaning),
                    variable.name,
                    variable.default,
                    variable.accepts
                ))
        });
        let program = Arg::new(PROGRAM)
            .value_names(["PROGRAM", "ARGS"])
            .num_args(1..)
            .required(true)
            .trailing_var_arg(true)
            .value_parser(OsStringValueParser::new())
            .help("The program and its arguments");
        command
            .args(options)
            .arg(program)
            .next_line_help(true)
            .override_usage("rdmasock run [OPTIONS] -- PROGRAM [ARGS]...")
            .after_help("An option that is not given leaves its variable as it is in the environment.")
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Options {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let variables = VARIABLES.iter().filter_map(|variable| {
            let value = matches.get_one::<OsString>(variable.name)?;
            Some((variable.name, value.clone()))
        });
        let program = matches.get_many(PROGRAM).unwrap_or_default();
        Ok(Self {
            variables: variables.collect(),
            program: program.cloned().collect(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Options {
    /// Checks the values of the options and of the variables in the environment, by the library's parser. Returns the
    /// configuration that the library will have.
    fn check(&self) -> Result<Config, clap::Error> {
        let inherited = VARIABLES
            .iter()
            .filter(|variable| self.option(variable.name).is_none())
            .filter_map(|variable| Some((variable.name.into(), env::var_os(variable.name)?)));
        let given = self.variables.iter();
        let given = given.map(|(name, value)| ((*name).into(), value.clone()));
        let (config, warnings) = Config::from_vars(inherited.chain(given));
        if warnings.is_empty() {
            return Ok(config);
        }
        let problems: Vec<_> = warnings.into_iter().map(|warning| warning.problem).collect();
        let text = format!("{}\n", problems.join("\n"));
        Err(clap::Error::raw(clap::error::ErrorKind::InvalidValue, text))
    }

    fn option(&self, name: &str) -> Option<&OsStr> {
        let found = self.variables.iter().find(|(given, _)| *given == name);
        found.map(|(_, value)| value.as_os_str())
    }
}

/// Executes the program, and returns only if that fails. A bad value of an option or variable ends the command with
/// status 2, as other faults of the command line do.
pub(crate) fn run(options: &Options) -> Result<()> {
    let config = options.check().unwrap_or_else(|error| error.exit());
    let [name, arguments @ ..] = options.program.as_slice() else {
        bail!("no program given");
    };
    let library = find_library(options.option(LIBRARY_VARIABLE))?;
    let allocator = match config.alloc {
        Alloc::Registered => Some(find_allocator(&library)?),
        Alloc::Off => None,
    };
    let program = find_program(name)?;
    let linked = match elf::libraries(&program)? {
        Err(obstacle) => bail!("{} {obstacle}", program.display()),
        Ok(linked) => linked,
    };
    let is_linked = |runtime: &str| linked.iter().any(|library| library.contains(runtime));
    if allocator.is_some() && SANITIZERS.iter().any(|s| is_linked(s.0)) {
        bail!(
            "{}: a sanitizer has a malloc of its own; leave --alloc and RDMASOCK_ALLOC out",
            program.display()
        );
    }
    let sanitizers = SANITIZERS.iter().filter(|s| is_linked(s.0)).map(|(_, name, option)| {
        // If an option is set several times, the sanitizer uses the last setting.
        let mut options = env::var_os(name).unwrap_or_default();
        options.push(":");
        options.push(option);
        (name, options)
    });
    let error = Command::new(&program)
        .arg0(name)
        .args(arguments)
        .envs(options.variables.iter().map(|(name, value)| (name, value)))
        .envs(sanitizers)
        .env(
            PRELOAD,
            std::iter::once(library)
                .chain(allocator)
                .fold(env::var_os(PRELOAD).unwrap_or_default(), preload),
        )
        .exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

/// Returns `list`, the libraries to preload, with `library` appended unless the list has it.
fn preload(mut list: OsString, library: impl AsRef<Path>) -> OsString {
    let library = library.as_ref();
    let is_separator = |byte: &u8| matches!(byte, b':' | b' ');
    let mut listed = list.as_bytes().split(is_separator);
    if !listed.any(|path| path == library.as_os_str().as_bytes()) {
        if !list.is_empty() {
            list.push(":");
        }
        list.push(library);
    }
    list
}

fn find_library(option: Option<&OsStr>) -> Result<PathBuf> {
    let given = option
        .map(OsStr::to_owned)
        .or_else(|| env::var_os(LIBRARY_VARIABLE))
        .filter(|path| !path.is_empty());
    let candidates = match given {
        Some(path) => vec![PathBuf::from(path)],
        None => {
            let exe = env::current_exe().context("cannot tell where this command is")?;
            let folder = exe.parent().unwrap_or(Path::new("/"));
            vec![folder.join(LIBRARY), folder.join("../lib").join(LIBRARY)]
        }
    };
    let Some(found) = candidates.iter().find(|path| path.is_file()) else {
        let tried: Vec<_> = candidates.iter().map(|path| path.display().to_string()).collect();
        bail!(
            "cannot find {LIBRARY} (tried {}); build it with `cargo build --release`, or say where \
             it is with --library PATH or {LIBRARY_VARIABLE}",
            tried.join(", ")
        );
    };
    let library = found.canonicalize().with_context(|| found.display().to_string())?;
    if library
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|byte| matches!(byte, b':' | b' '))
    {
        bail!(
            "{}: the dynamic loader takes no path with a space or a colon; put it elsewhere",
            library.display()
        );
    }
    Ok(library)
}

/// Returns the path of the registered allocator. It has to lie in the folder of the library, because both have to be of
/// the same version.
fn find_allocator(library: &Path) -> Result<PathBuf> {
    let allocator = library.with_file_name(ALLOCATOR);
    if !allocator.is_file() {
        bail!(
            "cannot find {ALLOCATOR} beside {LIBRARY} (tried {}), for RDMASOCK_ALLOC=registered; build it with `cargo build \
             --release -p rdmasock-alloc`, or leave the option and the variable out",
            allocator.display()
        );
    }
    Ok(allocator)
}

/// Returns the path of the program, as execvp(3) would find it.
fn find_program(name: &OsStr) -> Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Ok(PathBuf::from(name));
    }
    let path = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file() && access(file, Access::EXEC_OK).is_ok())
        .with_context(|| format!("{}: not found in PATH", name.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_appended_once() {
        let library = Path::new("/lib/librdmasock.so");
        for (before, after) in [
            (None, "/lib/librdmasock.so"),
            (Some(""), "/lib/librdmasock.so"),
            (Some("a.so b.so"), "a.so b.so:/lib/librdmasock.so"),
            (Some("/lib/librdmasock.so:b.so"), "/lib/librdmasock.so:b.so"),
        ] {
            let before = before.map(OsString::from).unwrap_or_default();
            assert_eq!(preload(before, library), after);
        }
    }
}

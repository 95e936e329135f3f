//! Fetches suites: Debian's binary and source packages through apt, and PyPI packages through pip. apt uses entries
//! derived from the machine's own, in a folder of this program. So the machine's settings, lists and installed packages
//! stay as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::case::{Place, Suite};

/// The folder of fetched suites, and of apt's own files.
#[derive(Debug)]
pub struct Workshop {
    root: PathBuf,
}

impl Workshop {
    /// Makes a workshop in the folder `root`.
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// Returns the suite as it was fetched earlier, or fetches it.
    ///
    /// # Errors
    /// If something cannot be fetched or built.
    pub fn place(&self, suite: &dyn Suite) -> Result<Place> {
        let dir = self.root.join(suite.name());
        let stamp = self.root.join(format!("{}.version", suite.name()));
        let recipe = suite.recipe();
        if let Ok(text) = fs::read_to_string(&stamp)
            && let Some((version, made_by)) = text.split_once('\n')
            && made_by == recipe
        {
            let version = version.to_owned();
            return Ok(Place { version, dir });
        }
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        fs::create_dir_all(&dir)?;
        let version = suite
            .fetch(self, &dir)
            .with_context(|| format!("fetching {}", suite.name()))?;
        fs::write(&stamp, format!("{version}\n{recipe}"))?;
        Ok(Place { version, dir })
    }

    /// Unpacks binary packages into `dir` without installing them, and returns the version of the first.
    ///
    /// # Errors
    /// If a package cannot be fetched.
    pub fn unpack(&self, packages: &[&str], dir: &Path) -> Result<String> {
        let debs = dir.join("debs");
        fs::create_dir_all(&debs)?;
        run(self.apt("apt-get")?.arg("download").args(packages).current_dir(&debs))?;
        let mut version = None;
        for package in packages {
            let deb = entry(&debs, |name| name.starts_with(&format!("{package}_")))?;
            run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(dir))?;
            let field = || run(Command::new("dpkg-deb").arg("-f").arg(&deb).arg("Version"));
            if version.is_none() {
                version = Some(field()?.trim().to_owned());
            }
        }
        fs::remove_dir_all(&debs)?;
        version.context("no package")
    }

    /// Unpacks a source package, and returns its folder and version. It is the newest version that can be fetched, as a
    /// mirror may list a version before it has the files.
    ///
    /// # Errors
    /// If no version can be fetched.
    pub fn source(&self, package: &str, dir: &Path) -> Result<(PathBuf, String)> {
        let listed = run(self.apt("apt-cache")?.args(["showsrc", "--only-source", package]))?;
        let mut versions: Vec<&str> = listed
            .lines()
            .filter_map(|line| line.strip_prefix("Version: "))
            .collect();
        versions.sort_by(|a, b| newer_first(a, b));
        versions.dedup();
        let mut failure = format!("there is no source package {package}");
        for version in versions {
            let wanted = format!("{package}={version}");
            let fetched = run(self
                .apt("apt-get")?
                .args(["source", "--only-source", &wanted])
                .current_dir(dir));
            match fetched {
                Ok(_) => {
                    remove_archives(package, dir)?;
                    let tree = entry(dir, |name| {
                        dir.join(name).is_dir() && dir.join(name).join("debian").is_dir()
                    })?;
                    return Ok((tree, version.to_owned()));
                }
                Err(error) => failure = format!("{error:#}"),
            }
        }
        bail!(failure)
    }

    /// Makes a Python environment with these packages from PyPI in `dir`, and returns the version of the first.
    ///
    /// # Errors
    /// If a package cannot be installed.
    pub fn venv(&self, packages: &[&str], dir: &Path) -> Result<String> {
        run(Command::new("/usr/bin/python3").args(["-m", "venv"]).arg(dir))?;
        let pip = dir.join("bin/pip");
        run(Command::new(&pip).args(["install", "-q", "--no-input"]).args(packages))?;
        let first = packages.first().context("no package")?;
        let name = first.split(['[', '=', '<']).next().unwrap_or(first);
        let shown = run(Command::new(&pip).args(["show", name]))?;
        let version = shown.lines().find_map(|line| line.strip_prefix("Version: "));
        Ok(version.context("pip show tells no version")?.to_owned())
    }

    /// Moves the folder `tests` of a package's source on PyPI into `dir`.
    ///
    /// # Errors
    /// If the source cannot be fetched.
    pub fn pypi_source(&self, package: &str, tests: &str, dir: &Path) -> Result<()> {
        let source = dir.join("source");
        let name = package.split(['[', '=', '<']).next().unwrap_or(package);
        // Only this package is fetched as source, so the tools that read its source need not be compiled.
        run(Command::new(dir.join("venv/bin/pip"))
            .args(["download", "-q", "--no-deps", "--no-binary", name, "-d"])
            .arg(&source)
            .arg(package))?;
        let archive = entry(&source, |name| name.ends_with(".tar.gz"))?;
        run(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&source))?;
        let tree = entry(&source, |name| source.join(name).is_dir())?;
        fs::rename(tree.join(tests), dir.join(tests))?;
        Ok(fs::remove_dir_all(&source)?)
    }

    /// Returns an apt command that uses the entries and lists in this folder.
    fn apt(&self, program: &str) -> Result<Command> {
        let root = self.root.join("apt");
        if !root.join("updated").exists() {
            self.update(&root)?;
        }
        Ok(self.configured(program, &root))
    }

    fn configured(&self, program: &str, root: &Path) -> Command {
        let mut command = Command::new(program);
        let at = |name: &str| root.join(name).display().to_string();
        for option in [
            "Dir::Etc::sourcelist=/dev/null".to_owned(),
            format!("Dir::Etc::sourceparts={}", at("parts")),
            format!("Dir::State::lists={}", at("lists")),
            format!("Dir::State::status={}", at("status")),
            format!("Dir::Cache={}", at("cache")),
            // The user that apt fetches as cannot enter these folders.
            "APT::Sandbox::User=root".to_owned(),
        ] {
            command.args(["-o", &option]);
        }
        command
    }

    fn update(&self, root: &Path) -> Result<()> {
        for dir in ["parts", "lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(root.join(dir))?;
        }
        // An empty status file means that no package is installed. So this apt always selects the distribution's own
        // version.
        fs::write(root.join("status"), "")?;
        let release = fs::read_to_string("/etc/os-release")?;
        let codename = release
            .lines()
            .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
            .context("/etc/os-release names no release")?;
        let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
        files.extend(
            fs::read_dir("/etc/apt/sources.list.d")?
                .flatten()
                .map(|entry| entry.path()),
        );
        let mut found = false;
        for file in files {
            let Ok(text) = fs::read_to_string(&file) else {
                continue;
            };
            let (derived, name) = match file.extension().and_then(|e| e.to_str()) {
                Some("sources") => (stanzas(&text, codename), file.file_name()),
                Some("list") => (lines(&text, codename), file.file_name()),
                _ => continue,
            };
            if let (false, Some(name)) = (derived.is_empty(), name) {
                found = true;
                fs::write(root.join("parts").join(name), derived)?;
            }
        }
        if !found {
            bail!("apt's sources have no entry for {codename}");
        }
        run(self.configured("apt-get", root).args(["-q", "update"]))?;
        Ok(fs::write(root.join("updated"), "")?)
    }
}

/// Removes the archives that a source package was unpacked from.
fn remove_archives(package: &str, dir: &Path) -> Result<()> {
    let prefix = format!("{package}_");
    for entry in fs::read_dir(dir)?.flatten() {
        if entry.path().is_file() && entry.file_name().to_string_lossy().starts_with(&prefix) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Returns the entries for this release in a file of stanzas, with sources.
fn stanzas(text: &str, codename: &str) -> String {
    let fits = |stanza: &&str| {
        let suites = stanza.lines().find_map(|line| line.strip_prefix("Suites:"));
        suites.is_some_and(|suites| suites.trim().starts_with(codename))
    };
    let with_sources = |stanza: &str| -> String {
        let kept = stanza.lines().filter(|line| !line.starts_with("Types:"));
        kept.fold("Types: deb deb-src\n".to_owned(), |all, line| all + line + "\n") + "\n"
    };
    text.split("\n\n").filter(fits).map(with_sources).collect()
}

/// Returns the entries for this release in a file of lines, with sources.
fn lines(text: &str, codename: &str) -> String {
    let mut derived = String::new();
    for line in text.lines() {
        let Some(entry) = line.trim().strip_prefix("deb ") else {
            continue;
        };
        // Options in brackets may contain spaces. The words after them are the address, the suite and the components.
        let plain = entry.rsplit_once(']').map_or(entry, |(_, rest)| rest);
        let suite = plain.split_whitespace().nth(1);
        if suite.is_some_and(|suite| suite.starts_with(codename)) {
            derived += &format!("deb {entry}\ndeb-src {entry}\n");
        }
    }
    derived
}

/// Compares two versions in Debian's order, the newest first.
fn newer_first(a: &str, b: &str) -> std::cmp::Ordering {
    use std::cmp::Ordering::{Equal, Greater, Less};
    let holds = |relation: &str| {
        let compared = Command::new("dpkg")
            .args(["--compare-versions", a, relation, b])
            .status();
        compared.is_ok_and(|status| status.success())
    };
    match (holds("gt"), holds("eq")) {
        (true, _) => Less,
        (_, true) => Equal,
        _ => Greater,
    }
}

/// Returns the path of an entry of `dir` whose name `fits`.
///
/// # Errors
/// If no entry fits, or `dir` cannot be read.
pub fn entry(dir: &Path, fits: impl Fn(&str) -> bool) -> Result<PathBuf> {
    fs::read_dir(dir)?
        .flatten()
        .find(|entry| fits(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path())
        .with_context(|| format!("{} lacks what was fetched", dir.display()))
}

/// Runs a command to its end and returns its standard output.
///
/// # Errors
/// If the command fails; the error has the end of its output.
pub fn run(command: &mut Command) -> Result<String> {
    use rdmasock_integration::proc::tail;
    let output = command
        .output()
        .with_context(|| format!("start {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!(
            "{command:?}: {}\n{}\n{}",
            output.status,
            tail(&output.stdout, 1500),
            tail(&output.stderr, 1500)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_entries_of_this_release_are_taken_and_with_sources() {
        let text = "Types: deb\nURIs: a\nSuites: two two-updates\n\nTypes: deb\nURIs: b\nSuites: other-two\n";
        assert_eq!(
            stanzas(text, "two"),
            "Types: deb deb-src\nURIs: a\nSuites: two two-updates\n\n"
        );
        let text = "# deb x two main\ndeb [signed-by=/k arch=amd64] a two main\ndeb b other main\ndeb-src a two main\n";
        assert_eq!(
            lines(text, "two"),
            "deb [signed-by=/k arch=amd64] a two main\ndeb-src [signed-by=/k arch=amd64] a two main\n"
        );
    }
}

//! Suites of Python's unittest: CPython's own, and the suites of packages that use unittest.
//! integration/suites/cases.py runs them and reports the beginning and the end of each case. So a case that hangs is
//! known by name.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::case::{Cases, Job, Outcome, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::{Workshop, entry};

/// The program that runs the cases. It is written into each scratch folder, so that every user can read it.
const CASES: &str = include_str!("../../../../suites/cases.py");

/// CPython's test modules for connections, or for ways to wait for them.
const CPYTHON: &[&str] = &[
    "test_asynchat",
    "test_asyncore",
    "test_concurrent_futures",
    "test_docxmlrpc",
    "test_eintr",
    "test_epoll",
    "test_fork1",
    "test_ftplib",
    "test_http_cookiejar",
    "test_httplib",
    "test_httpservers",
    "test_imaplib",
    "test_logging",
    "test_multiprocessing_fork",
    "test_multiprocessing_forkserver",
    "test_multiprocessing_main_handling",
    "test_multiprocessing_spawn",
    "test_nntplib",
    "test_os",
    "test_poll",
    "test_poplib",
    "test_robotparser",
    "test_select",
    "test_selectors",
    "test_signal",
    "test_smtpd",
    "test_smtplib",
    "test_socket",
    "test_socketserver",
    "test_ssl",
    "test_subprocess",
    "test_telnetlib",
    "test_threadsignals",
    "test_urllib",
    "test_urllib2",
    "test_urllib2_localnet",
    "test_urllib_response",
    "test_wsgiref",
    "test_xmlrpc",
];

/// The modules of [`CPYTHON`] for CI, and modules of asyncio's tests.
const CPYTHON_CI: &[&str] = &[
    "test_asynchat",
    "test_httpservers",
    "test_httplib",
    "test_smtplib",
    "test_select",
    "test_epoll",
    "test_asyncio.test_sock_lowlevel",
    "test_asyncio.test_sendfile",
    "test_asyncio.test_server",
];

/// Returns the suites of this family.
pub fn all() -> Vec<Box<dyn Suite>> {
    vec![
        Box::new(CPython),
        Box::new(Package {
            name: "tornado",
            requirements: &["tornado==6.6.1"],
            tests: "tornado/test",
            module: "tornado.test",
            ci: &["tcpclient_test", "tcpserver_test", "netutil_test"],
        }),
        Box::new(Package {
            name: "twisted",
            requirements: &[
                "twisted[tls,http2,conch]==26.10.0",
                "PyHamcrest==2.1.0",
                "hypothesis==6.170.17",
            ],
            tests: "twisted",
            module: "twisted",
            ci: &[],
        }),
        Box::new(Package {
            name: "gevent",
            requirements: &["gevent[test]==26.9.0"],
            tests: "gevent/tests",
            module: "gevent.tests",
            ci: &["test__socket", "test__server"],
        }),
        Box::new(Package {
            name: "uvloop",
            requirements: &[
                "uvloop==0.23.0",
                "aiohttp==3.14.5",
                "psutil==7.2.2",
                "pyOpenSSL==26.4.0",
            ],
            tests: "tests",
            module: "tests",
            ci: &[],
        }),
    ]
}

/// The suite of Debian's CPython, which is unpacked beside the machine's own.
struct CPython;

impl Suite for CPython {
    fn name(&self) -> &'static str {
        "cpython"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["python3.11", "openssl"]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        shop.unpack(
            &[
                "libpython3.11-testsuite",
                "python3.11",
                "python3.11-minimal",
                "libpython3.11-minimal",
                "libpython3.11-stdlib",
            ],
            dir,
        )
    }

    fn parts(&self, place: &Place, quick: bool) -> Result<Vec<String>> {
        if quick {
            return Ok(CPYTHON_CI.iter().map(|name| format!("test.{name}")).collect());
        }
        let mut parts: Vec<String> = CPYTHON.iter().map(|name| format!("test.{name}")).collect();
        let asyncio = place.dir.join("usr/lib/python3.11/test/test_asyncio");
        parts.extend(modules(&asyncio, "test.test_asyncio")?);
        Ok(parts)
    }

    fn job(&self, place: &Place, part: &str, selection: Selection<'_>, scratch: &Path) -> Result<Job> {
        let home = place.dir.join("usr");
        let python = home.join("bin/python3.11").display().to_string();
        Ok(job(&python, part, selection, scratch)?.env("PYTHONHOME", home.display().to_string()))
    }

    fn cases(&self, _part: &str, _ran: &Ran, scratch: &Path) -> Cases {
        cases(scratch)
    }

    fn selects(&self) -> bool {
        true
    }
}

/// A package of PyPI whose tests are in the package or in its source.
struct Package {
    name: &'static str,
    /// The requirements for pip, the package itself first.
    requirements: &'static [&'static str],
    /// The folder of the tests, in site-packages or the source, and the name of its Python package.
    tests: &'static str,
    module: &'static str,
    /// The modules for CI.
    ci: &'static [&'static str],
}

impl Suite for Package {
    fn name(&self) -> &'static str {
        self.name
    }

    fn packages(&self) -> &'static [&'static str] {
        &["python3-venv", "openssl"]
    }

    fn recipe(&self) -> String {
        self.requirements.join(" ")
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        let version = shop.venv(self.requirements, &dir.join("venv"))?;
        if !site_packages(dir).join(self.tests).is_dir() {
            let package = self.requirements.first().context("no package")?;
            shop.pypi_source(package, self.tests, dir)?;
        }
        Ok(version)
    }

    fn parts(&self, place: &Place, quick: bool) -> Result<Vec<String>> {
        if quick {
            return Ok(self.ci.iter().map(|name| format!("{}.{name}", self.module)).collect());
        }
        let installed = site_packages(&place.dir).join(self.tests);
        let dir = if installed.is_dir() {
            installed
        } else {
            place.dir.join(self.tests)
        };
        let mut parts = modules(&dir, self.module)?;
        // twisted has a folder of tests in each of its packages. These folders have the tests of connections.
        for inner in [
            "test",
            "internet/test",
            "protocols/test",
            "web/test",
            "conch/test",
            "mail/test",
        ] {
            if self.name == "twisted" {
                parts.extend(modules(
                    &dir.join(inner),
                    &format!("twisted.{}", inner.replace('/', ".")),
                )?);
            }
        }
        Ok(parts)
    }

    fn is_quick(&self) -> bool {
        !self.ci.is_empty()
    }

    fn job(&self, place: &Place, part: &str, selection: Selection<'_>, scratch: &Path) -> Result<Job> {
        let python = place.dir.join("venv/bin/python3").display().to_string();
        let job = job(&python, part, selection, scratch)?;
        Ok(job.env("PYTHONPATH", place.dir.display().to_string()))
    }

    fn cases(&self, _part: &str, _ran: &Ran, scratch: &Path) -> Cases {
        cases(scratch)
    }

    fn selects(&self) -> bool {
        true
    }
}

fn site_packages(dir: &Path) -> PathBuf {
    let lib = dir.join("venv/lib");
    let python = entry(&lib, |name| name.starts_with("python3")).unwrap_or(lib);
    python.join("site-packages")
}

/// Returns the modules `test_*.py` and `*_test.py` in a folder, with the names for import.
fn modules(dir: &Path, package: &str) -> Result<Vec<String>> {
    let mut found: Vec<String> = fs::read_dir(dir)
        .with_context(|| dir.display().to_string())?
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let name = name.strip_suffix(".py")?;
            (name.starts_with("test_") || name.ends_with("_test")).then(|| format!("{package}.{name}"))
        })
        .collect();
    found.sort();
    Ok(found)
}

/// Returns the job that runs a module's cases with `python`.
fn job(python: &str, part: &str, selection: Selection<'_>, scratch: &Path) -> Result<Job> {
    let at = |name: &str| scratch.join(name).display().to_string();
    fs::write(at("cases.py"), CASES)?;
    let mut command = vec![python.to_owned(), at("cases.py"), at("cases"), part.to_owned()];
    let (option, names) = match selection {
        Selection::All => return Ok(quick_to_stop(command)),
        Selection::Only(names) => ("--only", names),
        Selection::Except(names) => ("--except", names),
    };
    fs::write(at("selection"), names.join("\n"))?;
    command.extend([option.to_owned(), at("selection")]);
    Ok(quick_to_stop(command))
}

/// Makes a job that is stopped after 60 s of silence, as no case of these suites takes a minute.
fn quick_to_stop(command: Vec<String>) -> Job {
    let mut job = Job::new(command);
    job.silence = Duration::from_secs(60);
    job
}

/// Reads the cases that cases.py has reported. A case that began and has not ended is `Unfinished`.
fn cases(scratch: &Path) -> Cases {
    let told = fs::read(scratch.join("cases")).unwrap_or_default();
    super::told(&String::from_utf8_lossy(&told), |line| {
        let (word, name) = line.split_once(' ')?;
        let outcome = match word {
            "began" => Outcome::Unfinished,
            "passed" => Outcome::Passed,
            "failed" => Outcome::Failed,
            "skipped" => Outcome::Skipped,
            _ => return None,
        };
        Some((name.to_owned(), outcome))
    })
}

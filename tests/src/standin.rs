//! The stand-in for rdma-core (`c/verbs.c`): compiles it, and has programs run the verbs plugin on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};

/// The compiled stand-in, with the files that the plugin reads in `/sys/class`.
pub struct Standin {
    directory: tempfile::TempDir,
    plugin: PathBuf,
}

/// The device's resources for a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Bytes that are pinned.
    pub pinned: i64,
    /// Registrations.
    pub registered: i64,
    /// Queue pairs.
    pub queue_pairs: i64,
    /// Requests for memory that the limit on locked memory has refused.
    pub refused: i64,
}

/// The stand-in of this process, until the process ends.
static STANDIN: Mutex<Option<Arc<Standin>>> = Mutex::new(None);

/// Removes the stand-in's files.
extern "C" fn remove() {
    STANDIN.lock().unwrap_or_else(PoisonError::into_inner).take();
}

/// Returns the device's resources for a process; `None` if the process has not opened it.
pub fn counters(pid: u32) -> Option<Counters> {
    STANDIN.lock().ok()?.as_ref()?.counters(pid)
}

impl Standin {
    /// Returns the stand-in for the plugin beside this library; the first call compiles it.
    pub fn get(library: &Path) -> Result<Arc<Self>> {
        let mut standin = STANDIN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(standin) = &*standin {
            return Ok(Arc::clone(standin));
        }
        let new = Arc::new(Self::compile(library)?);
        // SAFETY: a function without arguments, of this program.
        unsafe { libc::atexit(remove) };
        *standin = Some(Arc::clone(&new));
        Ok(new)
    }

    fn compile(library: &Path) -> Result<Self> {
        let plugin = library.with_file_name("librdmasock_verbs.so");
        if !plugin.is_file() {
            bail!(
                "no {}: build it with `cargo build -p rdmasock-verbs --lib` in the library's profile",
                plugin.display()
            );
        }
        let directory = tempfile::tempdir()?;
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("c");
        let output = Command::new("cc")
            .args([
                "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-shared", "-fPIC",
            ])
            .arg(format!("-Wl,--version-script={}", sources.join("verbs.map").display()))
            .args(["-Wl,-soname,libibverbs.so.1", "-o"])
            .args([&directory.path().join("libibverbs.so.1"), &sources.join("verbs.c")])
            .output()
            .context("cc (Debian: apt install gcc libc6-dev libibverbs-dev librdmacm-dev)")?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr));
        }
        std::os::unix::fs::symlink("libibverbs.so.1", directory.path().join("librdmacm.so.1"))?;
        for (path, text) in [
            ("roce/infiniband/standin0/node_type", "1: CA\n"),
            ("roce/infiniband/standin0/ports/1/gid_attrs/ndevs/0", "lo\n"),
            ("iwarp/infiniband/standin0/node_type", "4: RNIC\n"),
            (
                "iwarp/infiniband/standin0/ports/1/gids/0",
                "0200:0000:0001:0000:0000:0000:0000:0000\n",
            ),
            ("iwarp/net/lo/address", "02:00:00:00:00:01\n"),
        ] {
            let path = directory.path().join(path);
            fs::create_dir_all(path.parent().unwrap())?;
            fs::write(path, text)?;
        }
        Ok(Self { directory, plugin })
    }

    /// Has a program move its connections to the plugin, on a device as `words` describe it (`c/verbs.c`).
    pub fn set(&self, command: &mut Command, words: &str) {
        let kind = if words.contains("iwarp") { "iwarp" } else { "roce" };
        command
            .env("LD_LIBRARY_PATH", self.directory.path())
            .env("VERBS_STANDIN", words)
            .env("RDMASOCK_DEV_LOCAL_DEVICE", &self.plugin)
            .env("RDMASOCK_DEV_SYS_CLASS", self.directory.path().join(kind))
            // Peers ask by name, as within a host: a single control port would serve all tests that run at once.
            .env("RDMASOCK_CONTROL_PORT", "0");
    }

    fn counters(&self, pid: u32) -> Option<Counters> {
        let table = fs::read(self.directory.path().join(pid.to_string())).ok()?;
        let (words, _) = table.as_chunks::<8>();
        let [pinned, registered, queue_pairs, refused] = words.first_chunk()?.map(i64::from_ne_bytes);
        Some(Counters {
            pinned,
            registered,
            queue_pairs,
            refused,
        })
    }
}

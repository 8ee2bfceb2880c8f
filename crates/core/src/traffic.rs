//! Counts of copies between host and device.

use std::ops::Sub;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number and the bytes of copies between host and device since the backend was created. If a caller reads these numbers twice, the
/// difference is the traffic between the two times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Copies from the host to the device.
    pub uploads: u64,
    /// Bytes of all copies from the host to the device.
    pub upload_bytes: u64,
    /// Copies from the device to the host.
    pub downloads: u64,
    /// Bytes of all copies from the device to the host.
    pub download_bytes: u64,
    /// Number of times the host waited for the device: one per [`Backend::download`](crate::Backend::download) and
    /// [`Backend::finish_download`](crate::Backend::finish_download).
    pub waits: u64,
    /// The number of writes to a buffer whose bytes another handle shared. Each such write first copied the whole buffer.
    pub copies_on_write: u64,
}

impl Sub for Traffic {
    type Output = Self;

    /// The traffic between `earlier` and `self`.
    fn sub(self, earlier: Self) -> Self {
        Self {
            uploads: self.uploads - earlier.uploads,
            upload_bytes: self.upload_bytes - earlier.upload_bytes,
            downloads: self.downloads - earlier.downloads,
            download_bytes: self.download_bytes - earlier.download_bytes,
            waits: self.waits - earlier.waits,
            copies_on_write: self.copies_on_write - earlier.copies_on_write,
        }
    }
}

/// Counts the copies of [`Traffic`]. Any thread may call its methods.
#[derive(Debug, Default)]
pub struct TrafficCounter {
    uploads: AtomicU64,
    upload_bytes: AtomicU64,
    downloads: AtomicU64,
    download_bytes: AtomicU64,
    waits: AtomicU64,
    copies_on_write: AtomicU64,
}

impl TrafficCounter {
    /// Counts a copy of `bytes` bytes to the device.
    pub fn upload(&self, bytes: usize) {
        self.uploads.fetch_add(1, Ordering::Relaxed);
        self.upload_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a copy of `bytes` bytes to the host.
    pub fn download(&self, bytes: usize) {
        self.downloads.fetch_add(1, Ordering::Relaxed);
        self.download_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a wait of the host for the device.
    pub fn wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a copy of a buffer that a write through a shared handle caused.
    pub fn copy_on_write(&self) {
        self.copies_on_write.fetch_add(1, Ordering::Relaxed);
    }

    /// The numbers that have been counted so far.
    pub fn so_far(&self) -> Traffic {
        let [uploads, upload_bytes, downloads, download_bytes, waits, copies_on_write] = [
            &self.uploads,
            &self.upload_bytes,
            &self.downloads,
            &self.download_bytes,
            &self.waits,
            &self.copies_on_write,
        ]
        .map(|count| count.load(Ordering::Relaxed));
        Traffic { uploads, upload_bytes, downloads, download_bytes, waits, copies_on_write }
    }
}

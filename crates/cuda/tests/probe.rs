//! Asking what CUDA there is fails nowhere; opening a device where there is none says so.

use nibble_cuda::compile::jit::{Jit, Nvrtc};
use nibble_cuda::compile::source::Sources;
use nibble_cuda::{Device, probe};

#[test]
fn the_probe_answers_everywhere() {
    let found = probe();
    let text = found.to_string();
    println!("{text}");
    assert!(text.contains("CUDA driver: ") && text.contains("NVRTC: ") && text.contains("cuBLASLt: "));
    match &found.driver {
        Ok(version) => assert!(*version >= (12, 8)),
        Err(why) => {
            assert!(!why.is_empty() && found.gpus.is_empty());
            assert!(text.contains("CUDA driver: unusable: ") && text.contains(why.as_str()));
        }
    }
    for gpu in &found.gpus {
        assert!(gpu.num_sms > 0 && gpu.memory_bytes > 0 && !gpu.name.is_empty(), "{gpu:?}");
    }
}

#[test]
fn opening_a_device_that_is_not_there_is_an_error_that_says_why() {
    let Ok(nvrtc) = Nvrtc::load() else {
        let error = Device::open(0).unwrap_err().to_string();
        assert!(error.contains("NVRTC"), "{error}");
        return;
    };
    let error = Device::with_jit(99, Jit::new(nvrtc, Sources::embedded(), None)).unwrap_err().to_string();
    let expected = probe().driver.as_ref().err().map_or("ordinal", String::as_str);
    assert!(error.contains(expected), "{error}");
}

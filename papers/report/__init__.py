"""The figures of the papers that this project follows, next to ours: python -m papers.report"""
